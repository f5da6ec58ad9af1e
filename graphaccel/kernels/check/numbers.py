"""Checks a fused op's numbers against eager's and float64 on a grid of cases.

An op passes where it is no worse than eager: for every output and every gradient

    max|fused − ref64| ≤ tolerance · max|eager − ref64| + one unit in the last place of the range

(as Dao-AILab's flash-attention tests its kernels), with the same dtypes, shapes and positions of
infinities and NaN, the same gradients missing, the same bits when repeated, the strides that the
fakes of forward and backward predicted, and unmodified inputs. Incoming gradients also have other
strides, and are also requested one at a time: of one input, from one output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphaccel.kernels.check.cases import GRADIENTS, cases
from graphaccel.kernels.check.runs import Requested, Results, Runs
from graphaccel.kernels.examples import fakes
from graphaccel.kernels.fusion import Fusion
from graphaccel.kernels.register import backward_of, tensors


@dataclass(frozen=True)
class Fault:
    """What is wrong, and in which case."""

    what: str
    case: str


def check_numbers(
    fusion: Fusion, device: str = "cpu", own_random: bool | None = None
) -> tuple[int, tuple[Fault, ...]]:
    """How many cases were run, and the faults; each kind of fault once, with its first case.

    own_random: whether a random op draws its own numbers there, so that eager must drop what it
      drops (`Fusion.kept`); by default where it has kernels of its own.
    """
    if own_random is None:
        own_random = device != "cpu" and fusion.cuda_forward is not None
    faults: dict[str, Fault] = {}
    grid = cases(fusion)
    for case in grid:
        for what in _Check(Runs(fusion, case, device, own_random)).faults():
            faults.setdefault(what.split(":")[0], Fault(what, str(case)))
    return len(grid), tuple(faults.values())


class _Check:
    """The faults of an op in one case."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.fusion, self.case = runs, runs.fusion, runs.case

    def faults(self) -> Iterator[str]:
        before = _copies(self.runs.values)
        fused = self.runs.fused(self.runs.everything)
        if isinstance(fused, str):
            yield fused
            return
        for name, copy in before.items():
            if not _same_bits(self.runs.values[name], copy):
                yield f"it writes to its input `{name}`"
        eager, true = self.runs.reference(self.runs.everything)
        for i, name in enumerate(self.fusion.outputs):
            yield from self._compare(
                f"output `{name}`", fused.outputs[i], eager.outputs[i], true.outputs[i]
            )
        yield from self._gradients(fused, eager, true)
        if self.fusion.rewrite is not None:
            return
        yield from self._repeatable(fused)
        if self.case.one_by_one:
            yield from self._one_by_one(eager, true)
        yield from self._fakes()

    def _gradients(
        self, fused: Results, eager: Results, true: Results, which: str = ""
    ) -> Iterator[str]:
        for name, mine in fused.gradients.items():
            theirs, exact = eager.gradients[name], true.gradients[name]
            what = f"gradient of `{name}`{which}"
            if theirs is None and mine is not None and which:
                # One output may not depend on every input: zeros are right too.
                theirs, exact = torch.zeros_like(mine), torch.zeros_like(mine).double()
            if mine is None or theirs is None:
                if (mine is None) != (theirs is None):
                    yield f"{what}: {_present(mine)}, eager has {_present(theirs)}"
                continue
            assert exact is not None
            yield from self._compare(what, mine, theirs, exact)

    def _one_by_one(self, eager: Results, true: Results) -> Iterator[str]:
        """The gradient of each input alone, and those of all from each output alone."""
        requests = [
            Requested(self.runs.everything.outputs, (n,)) for n in self.runs.everything.inputs
        ]
        requests = requests if len(requests) > 1 else []
        if len(self.runs.everything.outputs) > 1:
            requests += [
                Requested((n,), self.runs.everything.inputs) for n in self.runs.everything.outputs
            ]
        for requested in requests:
            which = f", that of `{requested.inputs[0]}` alone wanted"
            if requested.outputs != self.runs.everything.outputs:
                which = f", that of `{requested.outputs[0]}` alone given"
                eager, true = self.runs.reference(requested)
            fused = self.runs.fused(requested, which)
            if isinstance(fused, str):
                yield fused
            else:
                yield from self._gradients(fused, eager, true, which)

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

    def _repeatable(self, first: Results) -> Iterator[str]:
        second = self.runs.fused(self.runs.everything)
        assert isinstance(second, Results)
        pairs = [*zip(first.outputs, second.outputs, strict=True)]
        pairs += [
            (a, b)
            for a, b in zip(first.gradients.values(), second.gradients.values(), strict=True)
            if a is not None and b is not None
        ]
        if not all(_same_bits(a, b) for a, b in pairs):
            yield "repeated, it gives other bits"

    def _fakes(self) -> Iterator[str]:
        """Faults in the predictions of the forward's and backward's fakes."""
        fusion = self.fusion
        inputs = self.runs.all_inputs()
        with torch.no_grad():
            real = tensors(self.runs.op(*inputs.values()))
        yield from _fake_faults(
            self.runs.op, inputs, real, [f"`{n}`" for n in fusion.results], "its fake"
        )
        if fusion.inline or not fusion.differentiable:
            return
        op, returned = backward_of(self.runs.form), [f"gradient of `{n}`" for n in fusion.returned]
        for layout, requested in self._backward_requests():
            known = {**inputs, **dict(zip(fusion.results, real, strict=True))}
            for name, gradient in zip(
                fusion.outputs, self.runs.incoming(real, layout), strict=False
            ):
                missing = fusion.outputs[name].optional and name not in requested.outputs
                known[f"grad_{name}"] = None if missing else gradient
            known["wanted"] = [n in requested.inputs for n in fusion.inputs]
            passed = {n: known[n] for n in self.runs.form.read_back}
            before = _copies(passed)
            try:
                with torch.no_grad():
                    results = op(*passed.values())
            except Exception as error:
                yield f"its backward fails: {str(error).splitlines()[0]}"
                continue
            for name, copy in before.items():
                if not _same_bits(passed[name], copy):
                    yield f"its backward writes to `{name}`"
            gradients = [results] if len(returned) == 1 else [*results]
            yield from _fake_faults(op, passed, gradients, returned, "its fake of the backward")

    def _backward_requests(self) -> Iterator[tuple[str, Requested]]:
        """The gradients requested from the backward, and the strides of the incoming gradients."""
        every = self.runs.everything
        if not self.case.one_by_one:
            yield self.case.gradients, every
            return
        for layout in GRADIENTS:
            yield layout, every
            for name in every.inputs:
                yield layout, Requested(every.outputs, (name,))
            for name in every.outputs:
                yield layout, Requested((name,), every.inputs)


def _fake_faults(
    op: Any, inputs: Mapping[str, Any], real: Sequence[Tensor | None], names: list[str], who: str
) -> Iterator[str]:
    """Faults where an op's fake predicts something else than the op returns."""
    with fakes(inputs) as empty:
        try:
            result = op(*empty.values())
        except Exception as error:
            yield f"{who} fails: {str(error).splitlines()[0]}"
            return
    results = [result] if isinstance(result, Tensor) or result is None else [*result]
    for name, a, b in zip(names, real, results, strict=True):
        if a is None or b is None:
            if (a is None) != (b is None):
                yield f"{who} is wrong about {name}: {_present(b)}, the kernel gives {_present(a)}"
            continue
        for kind in ("dtype", "shape", "stride"):
            x, y = (v.stride() if kind == "stride" else getattr(v, kind) for v in (a, b))
            if x != y:
                yield f"{who} is wrong about the {kind} of {name}: {y}, the kernel gives {x}"


def _copies(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors among some values."""
    return {n: v.clone() for n, v in values.items() if isinstance(v, Tensor)}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0)) and torch.equal(
        torch.isnan(a), torch.isnan(b)
    )


def _present(value: Tensor | None) -> str:
    return "none" if value is None else "one"
