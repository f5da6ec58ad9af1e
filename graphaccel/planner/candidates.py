"""The candidates of a search: what is offered, and the seconds that each can not beat.

An axis is offered in the sizes for which the model has something to share out: tensor by the heads
of its attention and within the fastest links, context by the length of its sequences, expert by the
experts it holds. A bound is the work of the graph that a device runs, spread evenly over the
pipeline, with its collectives; the gradients, parameters and optimizer state that must move; no
messages, nothing recomputed. While a layout's graph is not made yet, its bound is that of a graph
it is made of (`parent`), all divided further but for what starting ops takes: an axis that comes
later leaves the collectives of those before it where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar, cast

import torch

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import SEQUENCE
from graphaccel.errors import BadPin
from graphaccel.ir.unfold import distinct_nodes, input_nodes
from graphaccel.planner.cost import counted_packet
from graphaccel.planner.estimate import LeastMoved, least_moved, least_optimizer
from graphaccel.planner.offload import device_state
from graphaccel.planner.pins import PRECISIONS, Pins, divisors
from graphaccel.planner.plan import GATHERS, Plan
from graphaccel.planner.solve import Problem, resident_parts
from graphaccel.planner.stages import candidate_cuts
from graphaccel.schedule.table import SCHEDULE_NAMES

T = TypeVar("T")
_INTERLEAVE = (1, 2, 4)
WORTH = 1.03
"""How much faster a plan must be to be worth axes or ZeRO that were not asked for: less than the
model of time can tell apart."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes that shard the graph itself."""

    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def replica(self) -> int:
        """Devices that hold one stage of one replica together."""
        return self.tensor * self.context * self.expert

    @property
    def parent(self) -> Layout:
        """The layout that this one is made of by one more axis: tensor is laid first."""
        if self.expert > 1:
            return replace(self, expert=1)
        return Layout(self.tensor) if self.context > 1 else Layout()


@dataclass(frozen=True)
class Shape:
    """One candidate before it is solved."""

    microbatches: int
    pipeline: int
    interleave: int
    recompute: str | tuple[str, ...]
    data: int
    zero: int = 0
    gather_again: bool | str = True
    accumulation: str = "whole"
    tensor: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = "1f1b"

    @property
    def order(self) -> tuple[object, ...]:
        """Between equals: fewer microbatches, less pipeline, less of everything."""
        depth = ("none", "some", "all").index(self.recompute) if isinstance(
            self.recompute, str) and self.recompute else 0  # fmt: skip
        return (self.microbatches, self.pipeline, self.interleave, depth, self.data, self.zero,
                GATHERS.index(self.gather_again), self.accumulation, self.tensor, self.context,
                self.expert, SCHEDULE_NAMES.index(self.schedule))  # fmt: skip

    @property
    def mesh(self) -> Shape:
        """What a deeper recomputation has in common with this."""
        return replace(self, recompute="")

    @property
    def layout(self) -> Layout:
        """Of the axes that shard the graph itself."""
        return Layout(self.tensor, self.context, self.expert)

    def microbatch_size(self, batch: int) -> int:
        """Examples in one microbatch on one data rank."""
        return batch // (self.data * self.microbatches)

    def on(self, base: Plan) -> Plan:
        """`base` with these decisions; cuts and recomputation come later."""
        return replace(base, **{k: v for k, v in vars(self).items() if k != "recompute"})


def plain(pins: Pins, found: Shape | Plan) -> bool:
    """Whether nothing is sharded that was not asked for."""
    axes = ("tensor", "context", "expert")
    asked = all(getattr(found, axis) == (getattr(pins, axis) or 1) for axis in axes)
    return asked and found.zero == (pins.zero or 0)


def base_layout(pins: Pins) -> Layout:
    """What was asked for, and nothing else."""
    return Layout(pins.tensor or 1, pins.context or 1, pins.expert or 1)


def layouts(problem: Problem, pins: Pins, batch: int) -> list[Layout]:
    """The layouts on offer, what was asked for first."""
    base = base_layout(pins)
    step, count = problem.profile.step, problem.cluster.count
    if not problem.layouts.offered or not step.has_loss:
        return [base]
    choices = [
        (getattr(pins, axis),) if getattr(pins, axis) is not None else sizes
        for axis, sizes in (
            ("tensor", tensor_sizes(problem)),
            ("context", context_sizes(step, count)),
            ("expert", tuple(n for n in expert_sizes(step, count) if batch % n == 0)),
        )
    ]
    found = [Layout(*sizes) for sizes in product(*choices)]
    return [base, *(x for x in found if x != base and count % x.replica == 0)]


def tensor_sizes(problem: Problem) -> tuple[int, ...]:
    """Divisors of the devices, no more than the fastest links hold, that share heads evenly."""
    step, cluster = problem.profile.step, problem.cluster
    heads, widths = set(), set()
    for node, _ in distinct_nodes(step.forward.graph):
        if "scaled_dot_product" in str(counted_packet(node)):
            heads.add(int(node.args[0].meta["val"].shape[1]))
    for value in _parameters(step).values():
        widths |= set(value.shape) if value.ndim > 1 else set()
    shared = heads or widths
    return tuple(
        n for n in divisors(cluster.count)
        if n == 1 or (n <= cluster.links[0].size and any(size % n == 0 for size in shared))
    )  # fmt: skip


def context_sizes(step: StepGraph, count: int) -> tuple[int, ...]:
    """Divisors of the devices that share a sequence evenly."""
    length = step.sizes.get(SEQUENCE, 1)
    return tuple(n for n in divisors(count) if length % n == 0)


def expert_sizes(step: StepGraph, count: int) -> tuple[int, ...]:
    """Divisors of the devices that share experts evenly: rows of a weight of three dims."""
    aten = torch.ops.aten
    experts = set()
    for node, value in _parameters(step).items():
        convolved = any(counted_packet(user) is aten.convolution for user in node.users)
        if value.ndim == 3 and not convolved:
            experts.add(int(value.shape[0]))
    return tuple(n for n in divisors(count) if n == 1 or any(e % n == 0 for e in experts))


def _parameters(step: StepGraph) -> dict[torch.fx.Node, torch.Tensor]:
    pairs = zip(input_nodes(step.graph), step.inputs, strict=True)
    return {node: node.meta["val"] for node, spec in pairs if spec.kind == "parameter"}


def shapes(problem: Problem, pins: Pins, batch: int) -> Iterator[Shape]:
    """Every candidate of every layout on offer."""
    for layout in layouts(problem, pins, batch):
        yield from shapes_of(problem, pins, batch, layout)


def shapes_of(problem: Problem, pins: Pins, batch: int, layout: Layout) -> Iterator[Shape]:
    """Every candidate of one layout."""
    choices = recomputes(problem, pins)
    for mesh in meshes_of(problem, pins, batch, layout):
        for choice in choices:
            yield replace(mesh, recompute=choice)


def meshes_of(problem: Problem, pins: Pins, batch: int, layout: Layout) -> Iterator[Shape]:
    """Every candidate of one layout, without its recomputation."""
    step, cluster = problem.profile.step, problem.cluster
    outer = cluster.count // layout.replica
    asked = layout == base_layout(pins)
    for data in divisors(outer):
        pipeline = outer // data
        if pins.zero and data == 1:
            continue
        if pins.data not in (None, data) or pins.pipeline not in (None, pipeline):
            continue
        if batch % data or (pipeline > 1 and not step.has_loss):
            continue
        if problem.limits.data and data > 1:
            continue
        for interleave in _interleaves(pins, pipeline):
            if pipeline * interleave <= max((s for _, s in pins.stages or ()), default=0) > 0:
                continue
            for microbatches in divisors(batch // data):
                if pins.microbatches not in (None, microbatches):
                    continue
                if microbatches > 1 and (problem.limits.microbatches or not step.has_loss):
                    continue
                if not asked and batch // (data * microbatches) % layout.expert:
                    continue
                for zero in _zeros(problem, pins, data, microbatches):
                    for schedule in _schedules(pins, pipeline, interleave, zero[0]):
                        yield Shape(
                            microbatches, pipeline, interleave, "", data, *zero,
                            layout.tensor, layout.context, layout.expert, schedule,
                        )  # fmt: skip


def _interleaves(pins: Pins, pipeline: int) -> tuple[int, ...]:
    if pins.cuts is not None:
        stages = len(pins.cuts) + 1
        fits = stages % pipeline == 0 and pins.interleave in (None, stages // pipeline)
        return (stages // pipeline,) if fits else ()
    if pins.interleave is not None:
        return (pins.interleave,) if pipeline > 1 or pins.interleave == 1 else ()
    if pipeline == 1 or pins.schedule in ("1f1b", "gpipe", "zero_bubble"):
        return (1,)
    return _INTERLEAVE


def _schedules(pins: Pins, pipeline: int, interleave: int, zero: int) -> tuple[str, ...]:
    if pins.schedule is not None:
        return (pins.schedule,)
    if interleave > 1:
        return ("interleaved",)
    apart = pipeline > 1 and zero < 2 and pins.ort in (None, "auto", "off")
    apart = apart and "activations" not in pins.on_host
    return ("1f1b", "zero_bubble") if apart else ("1f1b",)


def recomputes(problem: Problem, pins: Pins) -> tuple[str | tuple[str, ...], ...]:
    """The choices of what is computed again."""
    if pins.recompute is not None:
        return (pins.recompute,)
    return ("none", "some", "all") if problem.profile.block_names else ("none",)


def _zeros(
    problem: Problem, pins: Pins, data: int, microbatches: int
) -> Iterator[tuple[int, bool | str, str]]:
    """(zero, gather_again, accumulation), what was asked for or is usual first.

    With a level that was asked for, parameters are gathered again unless said otherwise: whoever
    asks for it wants the memory. Keeping them for a microbatch's backward is only another way than
    holding them for all where there is one microbatch, and what is gathered is float32: it takes as
    much memory.
    """
    again = True if pins.gather_again is None else pins.gather_again
    usual = again, pins.accumulation or "whole"
    low = PRECISIONS[pins.precision or "fp32"].stream != "float32"
    once = "step" if microbatches > 1 or low else False
    yield (pins.zero or 0, *usual)
    free = problem.shardable and problem.profile.step.has_loss and data > 1
    for zero in (1, 2, 3) if pins.zero is None else (pins.zero,):
        if not free and pins.zero is None:
            return
        agains = (True, once) if zero == 3 and pins.zero is None else (usual[0],)
        kinds = ("whole", "shards") if zero > 1 and microbatches > 1 else (usual[1],)
        for again in agains if pins.gather_again is None else (pins.gather_again,):
            for kind in kinds if pins.accumulation is None else (pins.accumulation,):
                if kind == "shards" and zero < 2:
                    continue
                if (zero, again, kind) != (pins.zero or 0, *usual):
                    yield zero, again, kind


class Bounds:
    """Seconds and bytes that candidates of one problem can not do with less than."""

    def __init__(self, problem: Problem, base: Plan) -> None:
        self._problem, self._base = problem, base
        self._refused: set[Layout] = set()
        self._built: set[Layout] = set()
        self._near: dict[Layout, Layout] = {}
        self._known: dict[Any, Any] = {}

    @property
    def problem(self) -> Problem:
        """What is planned."""
        return self._problem

    @property
    def offload(self) -> tuple[str, ...]:
        """What the plans keep on the host."""
        return self._base.offload

    @property
    def device_state(self) -> int:
        """Bytes of optimizer state on a device for each trained number."""
        return device_state(self._problem.optimizer_bytes, self.offload)

    @property
    def gathered(self) -> float:
        """Bytes that ZeRO 3 gathers for each byte of a parameter that it lets go of."""
        return 0.5 if self._base.precision.stream != "float32" else 1.0

    def build(self, layout: Layout) -> bool:
        """Shard the graph so, if it is not yet; False where it can not be."""
        if layout in self._refused:
            return False
        self._near.clear()
        try:
            self._problem.layouts.of(self._stands(layout))
        except BadPin:
            self._refused.add(layout)
            return False
        return True

    def built(self, layout: Layout) -> bool:
        """Whether the graph of a layout was made."""
        if layout not in self._built and layout not in self._refused:
            if not self._problem.layouts.known(self._stands(layout)):
                return False
            self._built.add(layout)
        return layout in self._built

    def nearest(self, layout: Layout) -> Layout:
        """The layout itself or, of those it is made of, the last whose graph was made."""
        if layout not in self._near:
            known = layout
            while not self.built(known):
                known = known.parent
            self._near[layout] = known
        return self._near[layout]

    def _stands(self, layout: Layout) -> Plan:
        return replace(self._base, **vars(layout), data=1, microbatches=1)

    def seconds(self, shape: Shape) -> float:
        """Seconds no plan of these axes, microbatches and ZeRO can beat."""
        layout = shape.layout
        known = self.nearest(layout)
        small = shape.microbatch_size(self._base.batch)
        sized = self._once(_sums, known, small)
        extra = layout.replica // known.replica
        low = shape.zero == 3 and shape.gather_again is not False and self.gathered < 1
        casts = sized.casts * (1 - 1 / shape.data) if low else 0.0
        work = sized.work - 2 * casts
        if extra > 1:
            work = sized.launches + max(work - sized.launches, 0.0) / extra
        even = work / shape.pipeline
        idle = (work - even) / shape.interleave
        if self._problem.cluster.device.crowd > 1:
            idle = 0.0
        if shape.schedule == "zero_bubble":
            idle = max(0.0, idle - 2 * sized.weight)
        moving, late = self._once(
            _outside, known, layout, shape.data, shape.pipeline, min(shape.zero, 2)
        )
        back = sized.backward - casts
        moved = moving.exposed(shape, work - back, back)
        return shape.microbatches * even + max(idle, moved) + late

    def too_big(self, shape: Shape) -> bool:
        """Whether what lies on the fullest device all the time, however much is computed again,
        is too much already; less by what a layout divides further, while its graph is not made."""
        layout = shape.layout
        known = self.nearest(layout)
        sized = self._once(_sums, known, shape.microbatch_size(self._base.batch))
        split = shape.microbatches > 1 or shape.data > 1
        parts = resident_parts(shape, self.device_state, self.gathered)
        held = sized.held * parts[0] + sized.trained * parts[2]
        if split and (shape.zero < 2 or shape.microbatches > 1):
            held += sized.trained * parts[1]
        extra = layout.replica // known.replica
        lean = 0 if "activations" in self.offload else sized.lean
        each = (held + lean) / shape.pipeline / extra
        return each > self._problem.cluster.tensor_budget

    def sums(self, known: Layout, small: int) -> Sums:
        """Of microbatches of `small` examples, on a layout whose graph was made."""
        return self._once(_sums, known, small)

    def _once(self, make: Callable[..., T], *key: Any) -> T:
        asked = make, *key
        if asked not in self._known:
            self._known[asked] = make(self, *key)
        return cast(T, self._known[asked])

    def plan(self, layout: Layout, **decided: Any) -> Plan:
        """A plan of this problem on a layout."""
        return replace(self._base, **vars(layout), **decided)


@dataclass(frozen=True)
class Sums:
    """Of a microbatch on all stages: seconds (casts: of parameters, in one phase); bytes of
    parameters, of what is saved if nothing and if all is computed again; the most that live within
    a phase, and the least that a cut sends."""

    work: float
    launches: float
    backward: float
    weight: float
    casts: float
    held: int
    trained: int
    lean: int
    kept: int
    passing: int
    crossing: int


def _sums(bounds: Bounds, known: Layout, small: int) -> Sums:
    plan = bounds.plan(known, data=1, microbatches=1, batch=small)
    profile, sized = bounds.problem.layouts.of(plan), bounds.problem.sized(plan)
    lean = int(sized.saved(range(len(profile.block_names)))[0].sum())
    cuts = candidate_cuts(profile, sized).bytes
    return Sums(
        sized.work,
        sized.launches,
        float(sized.backward.sum()),
        float(sized.weight.sum()),
        float(sized.casts.sum()),
        profile.held_bytes,
        profile.trained_bytes,
        lean,
        int(sized.saved()[0].sum()),
        int(max(sized.passing_forward.max(), sized.passing_backward.max())),
        min(cuts, default=0),
    )


def _outside(
    bounds: Bounds, known: Layout, layout: Layout, data: int, pipeline: int, zero: int
) -> tuple[LeastMoved, float]:
    """What moves over data, and the seconds of the optimizer."""
    problem, extra = bounds.problem, layout.replica // known.replica
    plan = bounds.plan(layout, data=data, pipeline=pipeline, zero=zero)
    profile = problem.layouts.of(bounds.plan(known, data=1, microbatches=1))
    moving = least_moved(profile, plan, problem.cluster, extra)
    return moving, least_optimizer(profile, plan, problem.cluster, problem.optimizer_bytes, extra)
