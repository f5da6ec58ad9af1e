"""Is a fused op right? Its numbers, against eager's and against float64, on a grid of cases.

An op passes where it is no worse than eager: for every output and every gradient

    max|fused − ref64| ≤ tolerance · max|eager − ref64| + one unit in the last place of the range

(Dao-AILab's flash-attention tests its kernels so), with the same dtypes, shapes and places of
infinities and NaN, the same gradients missing, the same bits when repeated, strides that the fake
foretold, and inputs that are left as they were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphaccel.kernels.examples import fakes, shape, sizes_of, truths
from graphaccel.kernels.fusion import Fusion, Scalar, T
from graphaccel.kernels.register import op_of, parameters, tensors, wide_form
from graphaccel.kernels.spec import Function

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "padded")
LEADING = ((3, 5), (2, 17))


@dataclass(frozen=True)
class Case:
    """One call: what it is given, in words. values: "normal", "large" or "masked". wide: by the
    form that computes in float32, against eager on inputs that are cast to it."""

    dtype: torch.dtype
    layout: str
    leading: tuple[int, ...]
    choice: int
    values: str
    pattern: int
    scalar: int = 0
    wide: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + (" in float32" if self.wide else "")
        return f"{kind}, {self.layout}, {self.values} values, leading {self.leading}"


@dataclass(frozen=True)
class Fault:
    """What is wrong, and in which case."""

    what: str
    case: str


def check_numbers(fusion: Fusion, device: str = "cpu") -> tuple[int, tuple[Fault, ...]]:
    """How many cases were run, and what was found; each kind of fault once, with its first case."""
    found: dict[str, Fault] = {}
    count = 0
    cases = [*_cases(fusion)]
    if wide_form(fusion) is not None:
        cases += [replace(c, wide=True) for c in cases if c.dtype != torch.float32]
    for case in cases:
        count += 1
        for what in _Run(fusion, case, device).faults():
            kind = what.split(":")[0]
            found.setdefault(kind, Fault(what, str(case)))
    return count, tuple(found.values())


def _cases(fusion: Fusion) -> Iterator[Case]:
    kinds: dict[tuple[str, ...], int] = {}
    for i, pattern in enumerate(fusion.patterns):
        kinds.setdefault(tuple(sorted(parameters(pattern))), i)
    masked = any(t.mask for t in fusion.tensors.values())
    choices = max((len(v) for v in fusion.sizes.values()), default=2)
    for dtype, layout, pattern in itertools.product(DTYPES, LAYOUTS, kinds.values()):
        for i, leading in enumerate(LEADING):
            yield Case(dtype, layout, leading, i % choices, "normal", pattern, i)
        yield Case(dtype, layout, LEADING[0], 1 % choices, "large", pattern)
        if masked and fusion.masked_rows and "mask" in parameters(fusion.patterns[pattern]):
            yield Case(dtype, layout, LEADING[1], 1 % choices, "masked", pattern)


class _Wide(TorchFunctionMode):
    """Casts to float32 become casts to float64, so that a float64 run stays one."""

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


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class _Result:
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


class _Run:
    """One case: the op, the pattern in the same dtype, and the pattern in float64."""

    def __init__(self, fusion: Fusion, case: Case, device: str) -> None:
        self.fusion, self.case, self.device = fusion, case, device
        form = wide_form(fusion) if case.wide else fusion
        assert form is not None
        self.op = form.rewrite or op_of(form)
        self.pattern = fusion.patterns[case.pattern]
        self.names = parameters(self.pattern)
        self.values = self._values()

    def faults(self) -> Iterator[str]:
        fusion = self.fusion
        before = {n: v.clone() for n, v in self.values.items() if isinstance(v, Tensor)}
        try:
            fused = self._fused()
        except Exception as error:
            yield f"it fails: {str(error).splitlines()[0]}"
            return
        for name, kept in before.items():
            if not _same_bits(self.values[name], kept):
                yield f"it writes to its input `{name}`"
        eager = self._run(self._plain, self._given(self.values))
        wide = {
            n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in self.values.items()
        }
        with _Wide():
            true = self._run(self._plain, self._given(wide))
        for i, name in enumerate(fusion.outputs):
            yield from self._compare(
                f"output `{name}`", fused.outputs[i], eager.outputs[i], true.outputs[i]
            )
        for name in fused.gradients:
            mine, theirs = fused.gradients[name], eager.gradients[name]
            if mine is None or theirs is None:
                if (mine is None) != (theirs is None):
                    yield f"gradient of `{name}`: {_some(mine)}, eager has {_some(theirs)}"
                continue
            wanted = true.gradients[name]
            assert wanted is not None
            yield from self._compare(f"gradient of `{name}`", mine, theirs, wanted)
        if fusion.rewrite is None:
            yield from self._repeatable(fused)
            yield from self._foretold()

    def _compare(self, what: str, mine: Tensor, theirs: Tensor, true: Tensor) -> Iterator[str]:
        if mine.dtype != theirs.dtype:
            yield f"dtype of {what}: {mine.dtype}, eager gives {theirs.dtype}"
            return
        if mine.shape != theirs.shape:
            yield f"shape of {what}: {tuple(mine.shape)}, eager gives {tuple(theirs.shape)}"
            return
        # Where eager overflows and the truth does not, a finite result is better, not wrong.
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
        # A sum of everything carries the rounding of every input, and eager's may cancel by luck.
        unit = torch.finfo(self.case.dtype if mine.dim() == 0 else mine.dtype).eps
        limit = self.fusion.tolerance * eager + unit * span
        if not ours <= limit:
            yield f"{what}: off by {ours:.2g}, eager by {eager:.2g}, allowed {limit:.2g}"

    def _repeatable(self, first: _Result) -> Iterator[str]:
        again = self._fused()
        pairs = [*zip(first.outputs, again.outputs, strict=True)]
        pairs += [
            (a, b)
            for a, b in zip(first.gradients.values(), again.gradients.values(), strict=True)
            if a is not None and b is not None
        ]
        if not all(_same_bits(a, b) for a, b in pairs):
            yield "repeated, it gives other bits"

    def _foretold(self) -> Iterator[str]:
        full = self._full(self.values)
        with torch.no_grad():
            real = tensors(self.op(*full.values()))
        with fakes(full) as given:
            fake = tensors(self.op(*given.values()))
        for name, a, b in zip(self.fusion.results, real, fake, strict=True):
            for kind in ("dtype", "shape", "stride"):
                x, y = (v.stride() if kind == "stride" else getattr(v, kind) for v in (a, b))
                if x != y:
                    yield f"its fake says {kind} {y} of `{name}`: the kernel gives {x}"

    def _fused(self) -> _Result:
        full = self._full(self.values)
        return self._run(lambda given: self.op(*given.values()), full)

    def _plain(self, given: Mapping[str, Any]) -> Any:
        """What eager computes."""
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
        """Every input of the op; what this pattern lacks is None or the default."""
        return {
            n: values[n] if n in self.names else (None if isinstance(spec, T) else spec.default)
            for n, spec in self.fusion.inputs.items()
        }

    def _run(self, call: Function, given: dict[str, Any]) -> _Result:
        """Outputs, and gradients for the same incoming ones."""
        fresh = {
            n: _tracked(v) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in given.items()
        }
        wanted = [
            n for n in self.names if n in self.fusion.tensors and isinstance(fresh[n], Tensor)
        ]
        wanted = [n for n in wanted if fresh[n].requires_grad]
        spared = [n for n in wanted if not self.fusion.tensors[n].differentiable]
        for name in spared:
            fresh[name].requires_grad_(False)
        wanted = [n for n in wanted if n not in spared]
        with torch.enable_grad(), torch.random.fork_rng(devices=[], enabled=self.fusion.random):
            if self.fusion.random:  # the same mask in every run
                torch.manual_seed(7)
            made = tensors(call(fresh))[: len(self.fusion.outputs)]
        generator = torch.Generator().manual_seed(7)
        incoming = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in made
        ]
        roots = [(o, g) for o, g in zip(made, incoming, strict=True) if o.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if roots and wanted:
            found = torch.autograd.grad(
                [o for o, _ in roots],
                [fresh[n] for n in wanted],
                [g for _, g in roots],
                allow_unused=True,
            )
        return _Result([o.detach() for o in made], dict(zip(wanted, found, strict=True)))

    def _values(self) -> dict[str, Any]:
        case, fusion = self.case, self.fusion
        sizes = sizes_of(fusion, case.choice)
        free = [n for n in sizes if n not in fusion.sizes]
        if case.choice and free:  # an odd size, and one that is no power of two
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
            hidden[..., -1, :] = True  # a row that sees nothing
            found = found.masked_fill(hidden, -math.inf)
        return _laid_out(found.to(case.dtype), case.layout)


def _tracked(value: Tensor) -> Tensor:
    """A leaf with the same strides."""
    return value.detach().requires_grad_(True)


def _laid_out(value: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides."""
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
