"""Registers fused ops through `torch.library`: forward, backward, fake and autograd.

`Library.define` and `impl` rather than `custom_op`: 9 µs per call against 29 (pytorch#177109), and
opaque in every kind of trace. The runtime calls ops without autograd; autograd is used for
differentiating the forward graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphaccel.errors import BadFusion, KernelFailed
from graphaccel.kernels.jit import has_triton
from graphaccel.kernels.spec import Function, Fusion, T
from graphaccel.kernels.widened import widened

NAMESPACE = "graphaccel"
_MARK = "graphaccel_fusion"
_SHIPPED = Path(__file__).parent / "ops"


def fusion_of(target: Any) -> Fusion | None:
    """The fusion whose forward or backward op a node calls, or None."""
    return getattr(target, _MARK, None)


def is_backward(target: Any) -> bool:
    """Whether a fused op is a backward op."""
    return str(target).endswith("_backward.default")


def op_of(fusion: Fusion) -> Any:
    """The forward op of a fusion."""
    return getattr(getattr(torch.ops, NAMESPACE), fusion.op_name).default


def backward_of(fusion: Fusion) -> Any:
    """The backward op of a fusion that has one."""
    return getattr(getattr(torch.ops, NAMESPACE), f"{fusion.op_name}_backward").default


def wide_form(fusion: Fusion) -> Fusion | None:
    """The variant of the op that computes in float32 for 16-bit inputs, if there is one
    (`widened`)."""
    op = getattr(getattr(torch.ops, NAMESPACE), f"{fusion.name}_wide", None)
    result = None if op is None else fusion_of(op.default)
    return result if result is not None and result.wide else None


def registered() -> tuple[Fusion, ...]:
    """Every fusion in torch's registry in this process, by name."""
    ops = getattr(torch.ops, NAMESPACE)
    collected = {fusion_of(getattr(ops, name).default) for name in list(ops)}
    return tuple(
        sorted((f for f in collected if f is not None and not f.wide), key=lambda f: f.name)
    )


def is_shipped(fusion: Fusion) -> bool:
    """Whether a fusion is one of this package."""
    return fusion.location is not None and Path(fusion.location.file).parent == _SHIPPED


def register(fusion: Fusion) -> None:
    """Create the ops of a fusion.

    Raises: BadFusion (GA701) where an op has its name already.
    """
    ops = getattr(torch.ops, NAMESPACE)
    if hasattr(ops, fusion.name):
        reason = "an op of this name is registered already"
        raise BadFusion(name=fusion.name, reason=reason, location=fusion.location)
    if fusion.rewrite is None:
        _define(fusion)
        wide = widened(fusion)
        if wide is not None:
            _define(wide)
    else:
        _define_name(fusion)


def _schema(fusion: Fusion) -> tuple[str, str]:
    """The schemas of the forward and backward op."""

    def declared(name: str) -> str:
        if name == "wanted":
            return "bool[] wanted"
        if name.startswith("grad_"):
            missing = "?" if fusion.outputs[name.removeprefix("grad_")].optional else ""
            return f"Tensor{missing} {name}"
        spec = fusion.inputs.get(name) or fusion.results[name]
        if isinstance(spec, T):
            return f"Tensor{'?' if spec.optional else ''} {name}"
        return f"{spec.type} {name}"

    def returns(count: int) -> str:
        return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    forward = ", ".join(declared(n) for n in fusion.inputs)
    backward = ", ".join(declared(n) for n in fusion.read_back)
    return (
        f"{fusion.op_name}({forward}) -> {returns(len(fusion.results))}",
        f"{fusion.op_name}_backward({backward}) -> {returns(len(fusion.returned))}",
    )


def _define(fusion: Fusion) -> None:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.nondeterministic_seeded,) if fusion.random else ()
    forward, backward = _schema(fusion)
    library.define(forward, tags=tags)
    name = f"{NAMESPACE}::{fusion.op_name}"
    assert fusion.forward is not None
    implement(library, fusion, fusion.op_name, fusion.forward, fusion.cuda_forward)
    torch.library.register_fake(name, fusion.fake or fusion.forward, lib=library)
    own = bool(fusion.differentiable) and not fusion.inline
    if own:
        library.define(backward)
        run = fusion.backward or _autograd_of(fusion)
        implement(library, fusion, f"{fusion.op_name}_backward", run, fusion.cuda_backward)
        fake = fusion.fake_backward or (_like_inputs(fusion) if fusion.backward is None else run)
        torch.library.register_fake(f"{name}_backward", fake, lib=library)
    if fusion.differentiable:
        _register_autograd(library, fusion)
    # The library lives as long as its ops, and the ops refer to their fusion.
    op_of(fusion).graphaccel_library = library
    for op in (op_of(fusion), backward_of(fusion)) if own else (op_of(fusion),):
        setattr(op, _MARK, fusion)


def _define_name(fusion: Fusion) -> None:
    """A rewrite has no op of its own; a declaration without implementation reserves its name."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{fusion.name}() -> ()")
    op_of(fusion).graphaccel_library = library
    setattr(op_of(fusion), _MARK, fusion)


def implement(
    library: Any, fusion: Fusion, name: str, run: Function, on_cuda: Function | None
) -> None:
    """Register an implementation whose failures name the op."""
    library.impl(name, _named(fusion, name, run), "CompositeExplicitAutograd")
    if on_cuda is not None and has_triton():
        library.impl(name, _named(fusion, name, _in_32_bits(on_cuda, run)), "CUDA")


def _in_32_bits(on_cuda: Function, run: Function) -> Function:
    """The kernel, which computes in at most float32; the reference for float64."""

    def call(*args: Any) -> Any:
        double = any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)
        return (run if double else on_cuda)(*args)

    return call


def _named(fusion: Fusion, op: str, run: Function) -> Function:
    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except torch.OutOfMemoryError:
            raise  # not a fault of the kernel, and scripts catch it
        except Exception as error:
            given = tuple(
                f"{'x'.join(map(str, a.shape)) or 'scalar'} {str(a.dtype).removeprefix('torch.')}"
                if isinstance(a, Tensor)
                else repr(a)
                for a in args
            )
            raise KernelFailed(
                name=fusion.name,
                op=op,
                arguments=given,
                cause=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                location=fusion.location,
            ) from error

    return call


def _register_autograd(library: Any, fusion: Fusion) -> None:
    names = tuple(fusion.inputs)
    results = tuple(fusion.results)
    read = fusion.read_back
    if fusion.inline:
        assert fusion.backward is not None
        op: Any = fusion.backward
    else:
        op = backward_of(fusion)
    outputs = {n: f"grad_{n}" for n in fusion.outputs}

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = dict(zip(names, inputs, strict=True))
        values |= dict(zip(results, output if len(results) > 1 else (output,), strict=True))
        ctx.set_materialize_grads(False)
        kept = [n for n in read if isinstance(values.get(n), Tensor)]
        ctx.save_for_backward(*(values[n] for n in kept))
        ctx.kept = kept
        ctx.like = [
            None if spec.optional else (values[n].shape, values[n].dtype, values[n].device)
            for n, spec in fusion.outputs.items()
        ]
        ctx.numbers = {n: values[n] for n in read if n in values and n not in kept}

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        values = dict(zip(ctx.kept, ctx.saved_tensors, strict=True)) | ctx.numbers
        if all(g is None for g in grads):
            return (None,) * len(names)
        for name, grad, like in zip(outputs.values(), grads, ctx.like, strict=False):
            if grad is None and like is not None:
                grad = torch.zeros(like[0], dtype=like[1], device=like[2])
            values[name] = grad
        values["wanted"] = list(ctx.needs_input_grad)
        result = op(*(values[n] for n in read))
        several = result if len(fusion.returned) > 1 else (result,)
        given = dict(zip(fusion.returned, several, strict=True))
        given |= {n: given[like] for n, like in fusion.gradients.items()}
        return tuple(
            given.get(n) if on else None for n, on in zip(names, ctx.needs_input_grad, strict=True)
        )

    torch.library.register_autograd(
        f"{NAMESPACE}::{fusion.op_name}", backward, setup_context=setup, lib=library
    )


def _split_backward(
    fusion: Fusion, args: tuple[Any, ...]
) -> tuple[list[Any], list[Any], list[bool]]:
    outputs = len(fusion.outputs)
    return list(args[:outputs]), list(args[outputs:-1]), args[-1]


def _autograd_of(fusion: Fusion) -> Function:
    """A backward that recomputes the forward under autograd."""
    names = tuple(fusion.inputs)
    forward = fusion.forward
    assert forward is not None

    def backward(*args: Any) -> Any:
        grads, values, _ = _split_backward(fusion, args)
        with torch.enable_grad():
            fresh = [
                v.detach().requires_grad_(True)
                if isinstance(v, Tensor) and n in fusion.differentiable
                else v
                for n, v in zip(names, values, strict=True)
            ]
            built = forward(*fresh)
            built = built if isinstance(built, tuple) else (built,)
            pairs = [
                (o, g.to(o.dtype))
                for o, g in zip(built, grads, strict=False)
                if g is not None and o.requires_grad
            ]
            roots = [v for v in fresh if isinstance(v, Tensor) and v.requires_grad]
            result = iter(
                torch.autograd.grad(
                    [o for o, _ in pairs], roots, [g for _, g in pairs], allow_unused=True
                )
            )
        by_name = {
            n: next(result)
            for n, v in zip(names, fresh, strict=True)
            if isinstance(v, Tensor) and v.requires_grad
        }
        return _one_or_all([_plain(by_name.get(n)) for n in fusion.returned])

    return backward


def _plain(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.contiguous()


def _like_inputs(fusion: Fusion) -> Function:
    def fake(*args: Any) -> Any:
        _, values, _ = _split_backward(fusion, args)
        given = dict(zip(fusion.inputs, values, strict=True))
        likes = [given[n] for n in fusion.returned]
        return _one_or_all([None if x is None else x.new_empty(x.shape) for x in likes])

    return fake


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def narrowed(fusion: Fusion, built: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Outputs declared "wide", in the 16 bits of a pattern that does not widen: rounded once, at
    the end, where the pattern rounds at every step."""
    rounded = list(built)
    for i, (spec, like) in enumerate(zip(fusion.outputs.values(), wanted, strict=False)):
        low = like.dtype in (torch.bfloat16, torch.float16)
        if spec.dtype == "wide" and low and i < len(rounded):
            rounded[i] = rounded[i].to(like.dtype)
    return rounded


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a result."""
    return [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)]


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters."""
    return tuple(inspect.signature(function).parameters)
