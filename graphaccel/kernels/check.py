"""Checks a fused op's numbers against eager's and float64 on a grid of cases.

An op passes where it is no worse than eager: for every output and every gradient

    max|fused − ref64| ≤ tolerance · max|eager − ref64| + one unit in the last place of the range

(as Dao-AILab's flash-attention tests its kernels), with the same dtypes, shapes and positions of
infinities and NaN, the same gradients missing, the same bits when repeated, the strides that the
fakes of forward and backward predicted, and unmodified inputs. Incoming gradients also have other
strides, and are also requested one at a time: of one input, from one output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.kernels.examples import fakes, shape, sizes_of, truths
from graphaccel.kernels.fusion import Fusion, Scalar, T
from graphaccel.kernels.register import backward_of, op_of, parameters, tensors, wide_form
from graphaccel.kernels.spec import Function

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "padded")
GRADIENTS = ("contiguous", "transposed", "expanded")
LEADING = ((3, 5), (2, 17), (7,), (2, 3, 4))


@dataclass(frozen=True)
class Case:
    """One call: its inputs, in words. layout, gradients: strides of the inputs, and of the incoming
    gradients. values: "normal", "large" or "masked". wide: by the form that computes in float32,
    against eager on inputs that are cast to it. alone: gradients one at a time too."""

    dtype: torch.dtype
    layout: str
    gradients: str
    leading: tuple[int, ...]
    choice: int
    values: str
    pattern: int
    scalar: int = 0
    wide: bool = False
    alone: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + (" in float32" if self.wide else "")
        strides = f"{self.layout}, gradients {self.gradients}"
        return f"{kind}, {strides}, {self.values} values, leading {self.leading}"


@dataclass(frozen=True)
class Fault:
    """What is wrong, and in which case."""

    what: str
    case: str


def check_numbers(
    fusion: Fusion, device: str = "cpu", own: bool | None = None
) -> tuple[int, tuple[Fault, ...]]:
    """How many cases were run, and the faults; each kind of fault once, with its first case.

    own: whether a random op draws its own numbers there, so that eager must drop what it drops
      (`Fusion.kept`); by default where it has kernels of its own.
    """
    own = device != "cpu" and fusion.cuda_forward is not None if own is None else own
    found: dict[str, Fault] = {}
    count = 0
    cases = [*_cases(fusion)]
    if wide_form(fusion) is not None:
        cases += [replace(c, wide=True) for c in cases if c.dtype != torch.float32]
    for case in cases:
        count += 1
        for what in _Run(fusion, case, device, own).faults():
            kind = what.split(":")[0]
            found.setdefault(kind, Fault(what, str(case)))
    return count, tuple(found.values())


def _cases(fusion: Fusion) -> Iterator[Case]:
    kinds: dict[tuple[str, ...], int] = {}
    for i, pattern in enumerate(fusion.patterns):
        kinds.setdefault(tuple(sorted(parameters(pattern))), i)
    masked = any(t.mask for t in fusion.tensors.values())
    choices = max((len(v) for v in fusion.sizes.values()), default=2)
    free = any("..." in t.indices for t in fusion.tensors.values())
    for dtype, (n, layout), pattern in itertools.product(
        DTYPES, enumerate(LAYOUTS), kinds.values()
    ):
        for i, leading in enumerate(LEADING if free else LEADING[:2]):
            came = GRADIENTS[(n + i) % 3]
            yield Case(
                dtype, layout, came, leading, i % choices, "normal", pattern, i,
                alone=n == i == 0,
            )  # fmt: skip
        yield Case(dtype, layout, GRADIENTS[n], LEADING[0], 1 % choices, "large", pattern)
        if masked and fusion.masked_rows and "mask" in parameters(fusion.patterns[pattern]):
            yield Case(dtype, layout, GRADIENTS[n], LEADING[1], 1 % choices, "masked", pattern)


class _Wide(TorchFunctionMode):
    """Turns casts to float32 into casts to float64, so that a float64 run stays one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        named = {k: _widened(v) for k, v in (kwargs or {}).items()}
        return func(*(_widened(a) for a in args), **named)


class _Drops(TorchDispatchMode):
    """Dropout keeps the elements in `mask`, in eager's dtype and with its gradient."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self._mask = mask

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.ops.aten.native_dropout.default:
            return func(*args, **(kwargs or {}))
        x, p = args[:2]
        mask = self._mask.reshape(x.shape)
        return x * mask.to(x.dtype) * (1.0 / (1.0 - p)), mask


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class _Result:
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


@dataclass(frozen=True)
class _Asked:
    """The outputs with incoming gradients, and the inputs whose gradients are requested."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


class _Run:
    """One case: the op, the pattern in the same dtype, and the pattern in float64."""

    def __init__(self, fusion: Fusion, case: Case, device: str, own: bool) -> None:
        self.fusion, self.case, self.device = fusion, case, device
        form = wide_form(fusion) if case.wide else fusion
        assert form is not None
        self.form = form
        self.op = form.rewrite or op_of(form)
        self.pattern = fusion.patterns[case.pattern]
        self.names = parameters(self.pattern)
        self.values = self._values()
        self.every = _Asked(tuple(fusion.outputs), self._differentiable())
        self.mask = self._mask() if own and fusion.kept is not None else None

    def faults(self) -> Iterator[str]:
        before = _kept(self.values)
        fused = self._fused(self.every)
        if isinstance(fused, str):
            yield fused
            return
        for name, kept in before.items():
            if not _same_bits(self.values[name], kept):
                yield f"it writes to its input `{name}`"
        eager, true = self._right(self.every)
        for i, name in enumerate(self.fusion.outputs):
            yield from self._compare(
                f"output `{name}`", fused.outputs[i], eager.outputs[i], true.outputs[i]
            )
        yield from self._gradients(fused, eager, true)
        if self.fusion.rewrite is not None:
            return
        yield from self._repeatable(fused)
        if self.case.alone:
            yield from self._one_at_a_time(eager, true)
        yield from self._foretold()

    def _differentiable(self) -> tuple[str, ...]:
        """Inputs that get a gradient in this case."""
        known = self.fusion.tensors
        return tuple(
            n
            for n in self.names
            if n in known and known[n].differentiable and self.values[n].is_floating_point()
        )

    def _right(self, asked: _Asked) -> tuple[_Result, _Result]:
        """Eager's results, and the float64 reference."""
        wide = {
            n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in self.values.items()
        }
        with _Drops(self.mask) if self.mask is not None else nullcontext():
            eager = self._run(self._plain, self._given(self.values), asked)
            with _Wide():
                return eager, self._run(self._plain, self._given(wide), asked)

    def _mask(self) -> Tensor:
        """The mask of elements that the op keeps, with the numbers that it draws."""
        assert self.fusion.kept is not None
        with torch.no_grad(), self._seeded():
            made = tensors(self.op(*self._full(self.values).values()))
        return self.fusion.kept(**dict(zip(self.fusion.results, made, strict=True)))

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Use the same random numbers in every run."""
        with torch.random.fork_rng(devices=[], enabled=self.fusion.random):
            if self.fusion.random:
                torch.manual_seed(7)
            yield

    def _gradients(
        self, fused: _Result, eager: _Result, true: _Result, alone: str = ""
    ) -> Iterator[str]:
        for name, mine in fused.gradients.items():
            theirs, wanted = eager.gradients[name], true.gradients[name]
            what = f"gradient of `{name}`{alone}"
            if theirs is None and mine is not None and alone:
                # One output may not depend on every input: zeros are right too.
                theirs, wanted = torch.zeros_like(mine), torch.zeros_like(mine).double()
            if mine is None or theirs is None:
                if (mine is None) != (theirs is None):
                    yield f"{what}: {_some(mine)}, eager has {_some(theirs)}"
                continue
            assert wanted is not None
            yield from self._compare(what, mine, theirs, wanted)

    def _one_at_a_time(self, eager: _Result, true: _Result) -> Iterator[str]:
        """The gradient of each input alone, and those of all from each output alone."""
        asked = [_Asked(self.every.outputs, (n,)) for n in self.every.inputs]
        asked = asked if len(asked) > 1 else []
        if len(self.every.outputs) > 1:
            asked += [_Asked((n,), self.every.inputs) for n in self.every.outputs]
        for some in asked:
            alone = f", that of `{some.inputs[0]}` alone wanted"
            if some.outputs != self.every.outputs:
                alone = f", that of `{some.outputs[0]}` alone given"
                eager, true = self._right(some)
            fused = self._fused(some, alone)
            if isinstance(fused, str):
                yield fused
            else:
                yield from self._gradients(fused, eager, true, alone)

    def _compare(self, what: str, mine: Tensor, theirs: Tensor, true: Tensor) -> Iterator[str]:
        if mine.dtype != theirs.dtype:
            yield f"dtype of {what}: {mine.dtype}, eager gives {theirs.dtype}"
            return
        if mine.shape != theirs.shape:
            yield f"shape of {what}: {tuple(mine.shape)}, eager gives {tuple(theirs.shape)}"
            return
        # Where eager overflows and the reference does not, a finite result is better, not wrong.
        right = torch.isfinite(theirs) | torch.isfinite(true.to(theirs.dtype))
        held = torch.isfinite(mine)
        if (torch.isfinite(theirs) & ~held).any() or (held & ~right).any():
            yield f"infinities or NaN of {what}: not where eager has them"
            return
        finite = torch.isfinite(theirs) & held & torch.isfinite(true)
        if not finite.any():
            return
        ours = (mine.double() - true)[finite].abs().max().item()
        eager = (theirs.double() - true)[finite].abs().max().item()
        span = true[finite].abs().max().item()
        # A sum of everything accumulates the rounding of every input, and eager's may cancel by
        # chance.
        unit = torch.finfo(self.case.dtype if mine.dim() == 0 else mine.dtype).eps
        limit = self.fusion.tolerance * eager + unit * span
        if not ours <= limit:
            yield f"{what}: off by {ours:.2g}, eager by {eager:.2g}, allowed {limit:.2g}"

    def _repeatable(self, first: _Result) -> Iterator[str]:
        again = self._fused(self.every)
        assert isinstance(again, _Result)
        pairs = [*zip(first.outputs, again.outputs, strict=True)]
        pairs += [
            (a, b)
            for a, b in zip(first.gradients.values(), again.gradients.values(), strict=True)
            if a is not None and b is not None
        ]
        if not all(_same_bits(a, b) for a, b in pairs):
            yield "repeated, it gives other bits"

    def _foretold(self) -> Iterator[str]:
        """Faults in the predictions of the forward's and backward's fakes."""
        fusion = self.fusion
        full = self._full(self.values)
        with torch.no_grad():
            real = tensors(self.op(*full.values()))
        yield from _as_said(self.op, full, real, [f"`{n}`" for n in fusion.results], "its fake")
        if fusion.inline or not fusion.differentiable:
            return
        op, returned = backward_of(self.form), [f"gradient of `{n}`" for n in fusion.returned]
        for layout, asked in self._asked_back():
            known = {**full, **dict(zip(fusion.results, real, strict=True))}
            for name, came in zip(fusion.outputs, self._incoming(real, layout), strict=False):
                missing = fusion.outputs[name].optional and name not in asked.outputs
                known[f"grad_{name}"] = None if missing else came
            known["wanted"] = [n in asked.inputs for n in fusion.inputs]
            given = {n: known[n] for n in self.form.read_back}
            before = _kept(given)
            try:
                with torch.no_grad():
                    made = op(*given.values())
            except Exception as error:
                yield f"its backward fails: {str(error).splitlines()[0]}"
                continue
            for name, kept in before.items():
                if not _same_bits(given[name], kept):
                    yield f"its backward writes to `{name}`"
            several = [made] if len(returned) == 1 else [*made]
            yield from _as_said(op, given, several, returned, "its fake of the backward")

    def _asked_back(self) -> Iterator[tuple[str, _Asked]]:
        """The gradients requested from the backward, and the strides of the incoming gradients."""
        every = self.every
        if not self.case.alone:
            yield self.case.gradients, every
            return
        for layout in GRADIENTS:
            yield layout, every
            for name in every.inputs:
                yield layout, _Asked(every.outputs, (name,))
            for name in every.outputs:
                yield layout, _Asked((name,), every.inputs)

    def _incoming(self, outputs: Iterable[Tensor], layout: str) -> list[Tensor]:
        """The same incoming gradients for the same outputs."""
        generator = torch.Generator().manual_seed(7)
        return [
            _laid_out(torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o), layout)
            for o in outputs
        ]

    def _fused(self, asked: _Asked, alone: str = "") -> _Result | str:
        """The op's results, or how it fails."""
        try:
            return self._run(lambda given: self.op(*given.values()), self._full(self.values), asked)
        except Exception as error:
            return f"it fails{alone}: {str(error).splitlines()[0]}"

    def _plain(self, given: Mapping[str, Any]) -> Any:
        """Eager's results."""
        low = self.case.dtype if self.case.wide else None
        return self.pattern(
            **{
                n: v.float() if isinstance(v, Tensor) and v.dtype == low else v
                for n, v in given.items()
            }
        )

    def _given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {n: values[n] for n in self.names}

    def _full(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Every input of the op; those that this pattern lacks are None or the default."""
        return {
            n: values[n] if n in self.names else (None if isinstance(spec, T) else spec.default)
            for n, spec in self.fusion.inputs.items()
        }

    def _run(self, call: Function, given: dict[str, Any], asked: _Asked) -> _Result:
        """Outputs, and gradients for the same incoming ones."""
        fresh = {n: _tracked(v) if n in asked.inputs else v for n, v in given.items()}
        with torch.enable_grad(), self._seeded():
            made = tensors(call(fresh))[: len(self.fusion.outputs)]
        came = self._incoming(made, self.case.gradients)
        roots = [
            (o, g)
            for n, o, g in zip(self.fusion.outputs, made, came, strict=True)
            if o.requires_grad and n in asked.outputs
        ]
        found: tuple[Tensor | None, ...] = (None,) * len(asked.inputs)
        if roots and asked.inputs:
            found = torch.autograd.grad(
                [o for o, _ in roots],
                [fresh[n] for n in asked.inputs],
                [g for _, g in roots],
                allow_unused=True,
            )
        return _Result([o.detach() for o in made], dict(zip(asked.inputs, found, strict=True)))

    def _values(self) -> dict[str, Any]:
        case, fusion = self.case, self.fusion
        sizes = sizes_of(fusion, case.choice)
        free = [n for n in sizes if n not in fusion.sizes]
        if case.choice and free:  # an odd size, not a power of two
            sizes |= {n: s for n, s in zip(free, itertools.cycle((17, 33)), strict=False)}
        generator = torch.Generator().manual_seed(len(str(case)))
        values: dict[str, Any] = {}
        for name, spec in fusion.inputs.items():
            if isinstance(spec, Scalar):
                options = (spec.default, *spec.examples)
                values[name] = options[case.scalar % len(options)]
            else:
                values[name] = self._tensor(spec, sizes, generator).to(self.device)
        return values

    def _tensor(self, spec: T, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        case = self.case
        wanted = shape(spec, sizes, case.leading)
        if spec.below:
            found = torch.randint(0, sizes[spec.below], wanted, generator=generator)
            if spec.ignored and found.numel() > 2:
                found.view(-1)[1::3] = -100
            return found
        if spec.mask or (spec.broadcast and case.choice == 0):
            wanted = (1, *wanted[1:])
        if spec.dtype == "bool":
            return truths(wanted, generator)
        found = torch.randn(wanted, generator=generator, dtype=torch.float64)
        if case.values == "large":
            found = found * min(self.fusion.large, 100.0 if case.dtype == torch.float16 else 1e30)
        if spec.mask and case.values == "masked" and found.dim() >= 2:
            hidden = torch.rand(wanted, generator=generator) < 0.3
            hidden[..., 0] = False
            hidden[..., -1, :] = True  # a row that attends to nothing
            found = found.masked_fill(hidden, -math.inf)
        return _laid_out(found.to(case.dtype), case.layout)


def _as_said(
    op: Any, given: Mapping[str, Any], real: Sequence[Tensor | None], names: list[str], who: str
) -> Iterator[str]:
    """Faults where an op's fake predicts something else than the op returns."""
    with fakes(given) as empty:
        try:
            made = op(*empty.values())
        except Exception as error:
            yield f"{who} fails: {str(error).splitlines()[0]}"
            return
    several = [made] if isinstance(made, Tensor) or made is None else [*made]
    for name, a, b in zip(names, real, several, strict=True):
        if a is None or b is None:
            if (a is None) != (b is None):
                yield f"{who} is wrong about {name}: {_some(b)}, the kernel gives {_some(a)}"
            continue
        for kind in ("dtype", "shape", "stride"):
            x, y = (v.stride() if kind == "stride" else getattr(v, kind) for v in (a, b))
            if x != y:
                yield f"{who} is wrong about the {kind} of {name}: {y}, the kernel gives {x}"


def _kept(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors among some values."""
    return {n: v.clone() for n, v in values.items() if isinstance(v, Tensor)}


def _tracked(value: Tensor) -> Tensor:
    """A leaf with the same strides."""
    return value.detach().requires_grad_(True)


def _laid_out(value: Tensor, layout: str) -> Tensor:
    """The same values with other strides; for "expanded", those of the first row in every row."""
    if layout == "expanded" and value.dim() >= 1:
        return value[:1].expand(value.shape)
    if layout == "transposed" and value.dim() >= 2:
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "padded" and value.dim() >= 1:
        room = value.new_zeros((*value.shape[:-1], value.shape[-1] + 3))
        room[..., : value.shape[-1]] = value
        return room[..., : value.shape[-1]]
    return value


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0)) and torch.equal(
        torch.isnan(a), torch.isnan(b)
    )


def _some(value: Tensor | None) -> str:
    return "none" if value is None else "one"
