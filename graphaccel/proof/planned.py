"""Compares the first step under a plan with the captured graph, run unsplit on one device.

Gradients are compared by two numbers each: their norm, and their dot product with a fixed
direction, which depends on signs and positions. Each shard contributes its part of both, so that
nothing large is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphaccel.errors import PlanDiffers
from graphaccel.ir.program import StepProgram
from graphaccel.ir.values import tensors_of
from graphaccel.passes.pipeline import prepared
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.progress import progress
from graphaccel.proof.comparison import Pair, Setting, draws, graph_results
from graphaccel.proof.constant_draws import ConstantDraws, can_be_constant
from graphaccel.proof.first_step import affordable
from graphaccel.proof.graph_step import GraphFailed
from graphaccel.proof.overflow import refuse_overflow
from graphaccel.proof.results import Results, shown
from graphaccel.proof.sums import Sums, sums_of
from graphaccel.runtime.execution.answers import from_all, from_first
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.layout import ShardLayout

SECONDS = 10.0
"""The whole first batch is run on one device if that takes at most this long, by the plan's
prediction of the compute time of all devices together."""
_SHOWN = 8
_BOUNDS = {"float64": (1e-8, 1e-12), "float32": (1e-3, 1e-5), "narrow": (3e-2, 1e-2)}
"""Narrowest dtype → how far a norm may be off, relative to itself; and a gradient's relative to the
largest gradient, a buffer's to the terms that it is a sum of.

Parts of a batch are summed in another order than the whole, which a norm averages out: zoo models
are at 1e-6 in float32. A gradient that is mathematically zero is rounding, of the size of the
others times the dtype's epsilon. The effect of a wrong rewrite (a part that is not summed, a mean
of means) is a hundred times larger.
"""

_LARGER = 4
"""How many times as large as a few draws of a rounding error another one may be."""
_SEEDS = (range(4), range(4, 16))
"""Of these draws; the second ones where the first do not explain all."""

Part = tuple[tuple[int, ...], float, float]


@dataclass(frozen=True)
class Given:
    """The results of one step under a plan on this rank. layouts: of sharded gradients. buffers:
    those held here. inputs: gradients by batch leaf."""

    loss: Tensor | None
    outputs: Mapping[int, Tensor]
    gradients: Mapping[str, Tensor]
    layouts: Mapping[str, ShardLayout]
    buffers: Mapping[str, Tensor]
    inputs: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """What the captured graph gives for the whole batch, as sums: (squared norm, dot product with
    the direction) by name.

    terms: of buffers that are sums, the norm of the sums of absolute values, by the same names.
    constant: with constants in the place of random draws. tried: whether a trial step is compared
    (`proof.trial`), because the training step gives other numbers or no gradients yet.
    """

    plan: str
    dtype: str
    values: Mapping[str, Sums] = field(repr=False)
    terms: Mapping[str, float] = field(default_factory=dict, repr=False)
    constant: bool = False
    tried: bool = False

    def check(
        self,
        mine: Mapping[str, Part],
        mesh: Mesh,
        rounding: Callable[[range], Mapping[str, float]] = lambda _: {},
    ) -> str:
        """Compare with the results of a step, as returned by `parts_of`; a collective over all
        ranks. Returns why the values prove nothing; "" where they prove the step.

        rounding: by how much rounding alone changes one device's own values in some draws,
        relative, by name; a collective that is called where values differ.

        Raises PlanDiffers (GA109) on every rank.
        """
        everyone: list[Any] = [mine]
        if mesh.world > 1:
            everyone = from_all(mine, "the first step's results of all ranks", mesh.world_group)
        wrong, error = self._compared(everyone)
        if wrong:
            own = _own_errors(wrong, rounding)
            if own:
                return (
                    f"rounding alone changes one device's own values by {shown(max(own.values()))}"
                )
            some = [sentence for _, _, sentence in wrong[:_SHOWN]]
            if len(wrong) > _SHOWN:
                some.append(f"and {len(wrong) - _SHOWN} more")
            raise PlanDiffers(plan=self.plan, values=tuple(some))
        nothing = self._nothing()
        if nothing:
            return nothing
        gradients = self._gradient_norms()
        count = sum(norm > self._floor for norm in gradients)
        what = "loss" if "loss" in self.values else "outputs"
        what += f" and {count} gradients" * bool(count)
        text = f"{what} of the plan's step equal one device's ({shown(error)})"
        if count < len(gradients):
            text += f", {len(gradients) - count} too small to tell from rounding"
        text += ", random draws held constant" * self.constant
        progress("proved", text, 0.0)
        return ""

    def _gradient_norms(self) -> list[float]:
        sums = self.values.items()
        return [math.sqrt(s) for name, (s, _) in sums if name.startswith("gradient")]

    @property
    def _floor(self) -> float:
        """A norm below which a gradient is rounding."""
        norms = [n for n in self._gradient_norms() if math.isfinite(n)]
        return _BOUNDS[self.dtype][1] * max(norms, default=0.0)

    def _nothing(self) -> str:
        """Why a step with these values need not be right; empty where it must be."""
        for name, (square, _) in self.values.items():
            own = name == "loss" or name.startswith("gradient")
            if own and not math.isfinite(square):
                return f"one device's own {name} is NaN or infinite"
        norms = self._gradient_norms()
        if norms and not any(norms):
            return f"all {len(norms)} gradients are zero"
        finite = any(math.isfinite(square) for square, _ in self.values.values())
        return "" if finite else "there is no finite number to compare"

    def _compared(
        self, everyone: list[Mapping[str, Part]]
    ) -> tuple[list[tuple[str, float, str]], float]:
        """((name, relative error, sentence) of each value that differs, the largest error)."""
        bound, _ = _BOUNDS[self.dtype]
        results = {name: None for one in everyone for name in one}
        wrong, largest = [], 0.0
        for name in dict.fromkeys((*self.values, *results)):
            parts = [one[name] for one in everyone if name in one]
            if name not in self.values or not parts:
                none = "no rank has one" if name in self.values else "one device has none"
                wrong.append((name, math.inf, f"{name}: {none}"))
                continue
            error = max(self.error(name, total) for total in _totals(parts))
            largest = max(largest, error)
            if not error <= bound:
                wrong.append((name, error, f"{name}: off by {error:.1e}"))
        return wrong, largest

    def error(self, name: str, value: Sums) -> float:
        """The relative error of a value that should be the one of that name."""
        bound, rounding = _BOUNDS[self.dtype]
        gradient = name.startswith("gradient")
        least = self._floor if gradient else rounding * self.terms.get(name, 0.0)
        return _relative(value, self.values[name], least / bound)


def _own_errors(
    wrong: Sequence[tuple[str, float, str]], rounding: Callable[[range], Mapping[str, float]]
) -> dict[str, float]:
    """How far rounding takes one device's own values, by name, where that explains all that
    differs; else empty. Of hundreds of values some change little in a few draws: then there are
    more."""
    own: dict[str, float] = {}
    for seeds in _SEEDS:
        for name, error in rounding(seeds).items():
            own[name] = max(error, own.get(name, 0.0))
        if not own:
            break
        usual = median(own.values())
        most = {name: _LARGER * max(error, usual) for name, error in own.items()}
        if all(off <= most.get(name, _LARGER * usual) for name, off, _ in wrong):
            return own
    return {}


def _relative(ours: Sums, theirs: Sums, least: float) -> float:
    """Difference of a norm and a dot product, relative to the norm."""
    if not all(map(math.isfinite, theirs)):  # a loss that overflows does so in any order
        return 0.0 if not all(map(math.isfinite, ours)) else math.inf
    norm = math.sqrt(theirs[0])
    scale = max(norm, least)
    if scale == 0.0:
        return 0.0 if ours[0] == 0.0 else math.inf
    # The dot product averages the signs of the differences: it is a little less sensitive.
    return max(abs(math.sqrt(ours[0]) - norm), abs(ours[1] - theirs[1]) / 2) / scale


def _totals(parts: list[Part]) -> Iterator[Sums]:
    """Sums over the shards, of the first and of the last replica of each: all other replicas are
    between ranks that were reduced together."""
    for order in (parts, parts[::-1]):
        shards: dict[tuple[int, ...], Sums] = {}
        for place, square, along in order:
            shards.setdefault(place, (square, along))
        yield sum(s for s, _ in shards.values()), sum(a for _, a in shards.values())


def parts_of(given: Given) -> dict[str, Part]:
    """This rank's part of the sums of all results of a step."""
    return dict(_parts(given))


def _parts(given: Given) -> Iterator[tuple[str, Part]]:
    if given.loss is not None:
        yield "loss", ((), *sums_of(given.loss))
    for leaf, tensor in given.outputs.items():
        if tensor.is_floating_point():
            yield f"output {leaf}", ((), *sums_of(tensor))
    for name, tensor in given.buffers.items():
        yield f"new value of `{name}`", ((), *sums_of(tensor))
    for name, tensor in given.gradients.items():
        layout = given.layouts.get(name)
        place = ()
        if layout is not None:
            place = tuple(layout.mesh.coordinate(split.axis) for split in layout.splits)
        yield f"gradient of `{name}`", (place, *sums_of(tensor, layout))
    for leaf, tensor in given.inputs.items():
        yield f"gradient of input leaf {leaf}", ((), *sums_of(tensor))


def expect(
    pair: Pair,
    plan: Plan,
    program: StepProgram,
    devices: int,
    *,
    example: bool,
    known: Results | None = None,
) -> Expected | str:
    """What the captured graph gives for the batch of the pair, or why it is not computed.

    program: of the plan. example: whether the first training step may come with other random
    states. known: what the graph gave for the batch when it was compared with eager, as sums; used
    where the plan's step has the same graph. Parameters must still be full. Nothing is changed.

    Raises PlanDiffers (GA109) where the graph cannot be run, or overflows in the plan's precision.
    """
    reason = _too_much(pair, plan, devices)
    if reason:
        return reason
    split = devices > 1 or plan.microbatches > 1 or bool(plan.fusions) or plan.compile != "off"
    constant = (split or example) and draws(pair.step)
    if constant and not all(can_be_constant(g.graph) for p in program.stages for g in p.graphs):
        return "its random draws are made inside of a kernel, and are not those of one device"
    step = prepared(pair.step, replace(plan, fusions=()))
    error: GraphFailed | None = None
    try:
        with ConstantDraws() if constant else nullcontext():
            known = known if step.graph is pair.step.graph and not constant else None
            built = known or graph_results(replace(pair, step=step), sums_of)
            if step.graph is not pair.step.graph:
                refuse_overflow(pair, step, built, plan)
    except torch.OutOfMemoryError:
        return "not enough memory for the whole batch on one device"
    except GraphFailed as failed:
        error = failed
    if error is not None:
        pair.eager_runs()  # a batch that eager code can not run either is the script's fault
        raise PlanDiffers(plan=plan_name(plan), values=(f"on one device: {error}",)) from error
    values = named_sums(built, plan)
    terms = {f"new value of `{n}`": size for n, size in built.magnitudes.items()}
    tried = constant or built.loss is None
    return Expected(plan_name(plan), _dtype(pair, plan), values, terms, constant, tried)


def named_sums(built: Results, plan: Plan) -> dict[str, Sums]:
    """What a step under a plan hands out, by name. built: results that were kept as sums."""
    values: dict[str, Any] = {} if built.loss is None else {"loss": built.loss}
    if plan.outputs != "loss" or built.loss is None:
        values |= {f"output {leaf}": sums for leaf, sums in built.outputs.items()}
    values |= {f"gradient of `{n}`": sums for n, sums in built.gradients.items()}
    values |= {f"gradient of input {n}": sums for n, sums in built.inputs.items()}
    values |= {f"new value of `{n}`": sums for n, sums in built.buffers.items()}
    return values


def expect_together(
    pair: Pair,
    plan: Plan,
    program: StepProgram,
    devices: int,
    *,
    example: bool,
    known: Results | None = None,
) -> Expected | str:
    """`expect` on rank 0 for all. A collective.

    Raises what `expect` raises.
    """
    said: list[Any] = [None]
    if devices == 1 or dist.get_rank() == 0:
        try:
            said[0] = expect(pair, plan, program, devices, example=example, known=known)
        except PlanDiffers as error:  # on all ranks: none may wait for another in the step
            said[0] = error
    if devices > 1:
        said = [from_first(said[0], "the proof of the plan's step on rank 0")]
    if isinstance(said[0], PlanDiffers):
        raise said[0]
    return said[0]


def _too_much(pair: Pair, plan: Plan, devices: int) -> str:
    """Why the whole batch is not run on one device; empty where it is."""
    if any(p.is_meta for p in pair.subject.model.parameters()):
        return "the model has no weights yet"
    seconds = plan.prediction.seconds * devices if plan.prediction is not None else 0.0
    if seconds > SECONDS:
        return f"one device needs {seconds:.0f} s for the whole batch"
    if not affordable(pair, Setting()):
        return "not enough memory for the whole batch on one device"
    return ""


def _dtype(pair: Pair, plan: Plan) -> str:
    """The narrowest dtype of the computation."""
    if plan.precision.compute != "float32" or plan.precision.matmul:
        return "narrow"
    nodes = pair.step.graph.graph.nodes
    results = {t.dtype for n in nodes for t in tensors_of(n.meta.get("val"))}
    if results & {torch.bfloat16, torch.float16}:
        return "narrow"
    return "float32" if torch.float32 in results else "float64"
