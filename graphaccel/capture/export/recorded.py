"""Record calls of `torch.autograd.Function` and of tensor hooks while a forward is exported.

Each call is first tried outside of the trace, on tensors without data: what it returns, whether its
backward runs without data, and whether it reads nothing but its arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from graphaccel.capture.export.python_function import (
    CALLS,
    FunctionCall,
    PythonFunction,
    Result,
    RuleRefused,
    Slot,
    python_function,
)
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.autograd import (
    apply_function,
    forward_class,
    functions_applied_by,
    is_checkpoint,
)
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.compat.torch.modes import TorchDispatchMode, outside_modes
from graphaccel.compat.torch.tensors import storage_key, version

_ARGUMENTS = "give it as an argument:  {name}.apply(x, {what})"
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)
_TORCH = ("torch._", "torch.fx.", "torch.utils.")
"""Modules of torch whose own autograd functions are part of its tracing."""

aten = torch.ops.aten


@contextmanager
def recording() -> Iterator[None]:
    """A context in which `Function.apply` is recorded. Raises RuleRefused."""

    def apply(kind: type[Function], args: tuple) -> Any:
        if is_checkpoint(kind):  # same result; the plan decides what is recomputed
            function, _, *inputs = args
            reached = any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
            with torch.set_grad_enabled(torch.is_grad_enabled() and reached):
                return function(*inputs)
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if _is_own(kind) or not recorded:
            return apply_function(kind, *args)
        return _applied(kind, args)

    with functions_applied_by(apply, _refuse_transformed):
        yield


def _refuse_transformed(kind: type[Function]) -> None:
    raise RuleRefused(
        f"the backward of `{kind.__name__}`",
        "it is applied inside of a transform of torch.func",
        f"call {kind.__name__}.apply outside of torch.func.grad and torch.func.vmap",
    )


def functions_behind(results: Sequence[Any]) -> Iterator[type]:
    """The classes of autograd functions in the graph of some results, without those of torch's
    implementation and of the recording."""
    seen: set[Any] = set()
    stack = [x.grad_fn for x in results if isinstance(x, torch.Tensor)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = forward_class(node)
        if kind is not None and not _is_own(kind):
            yield kind
        stack += [before for before, _ in node.next_functions]


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith(_TORCH) or kind in (_Recorded, _Inner)


def _applied(kind: type[Function], args: tuple) -> Any:
    name = kind.__qualname__.rpartition(".")[2]
    what = f"the backward of `{name}`"
    if kind.__name__ == "BackwardHookFunction":
        raise RuleRefused(
            "a backward hook on a module",
            "modules are not called when the step runs as one graph",
            "use a hook on a tensor:  h.register_hook(function)",
        )
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    others = [x for x in args if not isinstance(x, torch.Tensor)]
    if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(others)):
        raise RuleRefused(
            what,
            "a tensor in a list or dict is no input of it: it has no gradient there",
            f"give tensors one by one:  {name}.apply(*tensors)",
        )
    held = [
        (i, x) for i, x in enumerate(args) if not _is_plain(x) and not isinstance(x, torch.Tensor)
    ]
    structure, results = _tried(kind, args, name)
    target = PythonFunction(
        name,
        kind,
        tuple(held),
        tuple(t.dtype for t in tensors),
    )
    numbers = iter(range(len(tensors)))
    places = dict(held)
    template = tuple(
        Slot(next(numbers)) if isinstance(x, torch.Tensor) else None if i in places else x
        for i, x in enumerate(args)
    )
    built = iter(record(FunctionCall(target, template, results), tensors))
    rebuilt = [next(built) if isinstance(x, Slot) else x for x in structure[1]]
    return rebuilt[0] if structure[0] is None else tuple(rebuilt)


def record(call: FunctionCall, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of a call in the trace, connected to autograd."""
    calls = CALLS.get().calls
    calls.append(call)
    return apply_function(_Recorded, len(calls) - 1, call, *tensors)


class _Recorded(Function):
    """A recorded call in the autograd graph of the trace, which tracks what has a gradient."""

    @staticmethod
    def forward(ctx: Any, number: int, call: FunctionCall, *tensors: torch.Tensor) -> Any:
        built = tuple(python_function()(list(tensors), number))
        fixed = [t for t, r in zip(built, call.results, strict=True) if not r.differentiable]
        ctx.mark_non_differentiable(*fixed)
        ctx.name = call.target.name
        return built

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuleRefused(
            f"the backward of `{ctx.name}`",
            "the forward itself asks for a gradient through it (torch.autograd.grad)",
            "return what is to be differentiated, and let the script do it with loss_fn='outside'",
        )


def _tried(
    kind: type[Function], args: tuple, name: str
) -> tuple[tuple[Any, list[Any]], tuple[Result, ...]]:
    """What a call returns, with tensors as `Slot`, and their layouts.

    Raises RuleRefused."""
    mode = next(x.fake_mode for x in args if isinstance(x, FakeTensor))
    what = f"the backward of `{name}`"
    with outside_modes(), mode, torch.enable_grad():
        fresh = [_apart(x) for x in args]
        inputs = [x for x in fresh if isinstance(x, torch.Tensor)]
        versions = [version(x) for x in inputs]
        with _Alone(what, inputs, name), _explaining(what, name):
            result = apply_function(kind, *fresh)
            several = result if isinstance(result, (tuple, list)) else (result,)
            outputs = [x for x in several if isinstance(x, torch.Tensor)]
            if [version(x) for x in inputs] != versions:
                raise RuleRefused(
                    what,
                    "its forward writes over its input (mark_dirty)",
                    "return a new tensor from its forward:  x.clone()",
                )
            reached = [x for x in outputs if x.requires_grad]
            if reached:
                torch.autograd.grad(
                    reached,
                    [x for x in inputs if x.requires_grad],
                    [torch.empty_like(x) for x in reached],
                    allow_unused=True,
                )
        results = tuple(map(Result.of, outputs))
    numbers = iter(range(len(outputs)))
    said = [Slot(next(numbers)) if isinstance(x, torch.Tensor) else x for x in several]
    return (None if result is not several else type(result), said), results


def tried_hook(hook: Callable[[torch.Tensor], Any], tensor: Any) -> None:
    """Raises RuleRefused unless a hook on a tensor maps a gradient to one of the same shape."""
    what, name = "the hook on a tensor", "hook"
    with outside_modes(), tensor.fake_mode, torch.no_grad():
        gradient = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        with _Alone(what, [gradient], name), _explaining(what, name):
            result = hook(gradient)
        returned = isinstance(result, torch.Tensor)
        kept = [weakref.ref(one) for one in (gradient, result) if isinstance(one, torch.Tensor)]
        fits = returned and result.shape == gradient.shape
        del gradient, result
    if not returned:
        raise RuleRefused(
            what,
            "it returns None: what it does with the gradient would be done once, at capture",
            "read gradients of parameters in the script, after loss.backward()",
        )
    if not fits:
        raise RuleRefused(what, "it returns another shape", "return a gradient of the same shape")
    if any(ref() is not None for ref in kept):
        raise RuleRefused(
            what,
            "it keeps the gradient, which would be that of the capture for ever",
            "return the tensor from the model's forward, with loss_fn='outside'",
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list, torch.Size) and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _apart(value: Any) -> Any:
    """A separate tensor without data, with the layout of a traced one."""
    if not isinstance(value, torch.Tensor):
        return value
    built = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return apply_function(_Inner, built.requires_grad_()) if value.requires_grad else built


class _Inner(Function):
    """A non-leaf tensor with the layout of another."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Alone(TorchDispatchMode):
    """Refuses calls that read a tensor which is neither given nor computed from given ones."""

    def __init__(self, what: str, given: Sequence[torch.Tensor], name: str) -> None:
        super().__init__()
        self._what, self._name = what, name
        self._alive = list(given)  # or its storage key could be reused
        self._known = set(map(storage_key, given))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and storage_key(value) not in self._known:
                built_here = func in (aten.lift_fresh.default, aten.lift.default)
                if not built_here or value.numel() != 1:  # `torch.tensor(0.5)` is a number
                    raise RuleRefused(
                        self._what,
                        f"it reads a tensor of shape {list(value.shape)} that is not among its "
                        "arguments",
                        _ARGUMENTS.format(name=self._name, what="weight")
                        if self._name != "hook"
                        else "compute with the gradient and numbers alone",
                    )
        result = func(*args, **kwargs)
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._alive.append(value)
                self._known.add(storage_key(value))
        return result


@contextmanager
def _explaining(what: str, name: str) -> Iterator[None]:
    """Raises RuleRefused for what fails on tensors without data."""
    try:
        yield
    except RuleRefused:
        raise
    except Exception as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
        raise RuleRefused(
            what,
            f"it does not run on tensors without values: {said[:200]}",
            "compute with torch's ops alone, and branch on shapes and numbers only",
        ) from error
