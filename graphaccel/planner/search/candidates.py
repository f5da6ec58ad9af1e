"""Enumerates the candidates of a search.

An axis is offered in the sizes that divide something in the model: tensor by the heads of its
attention and within the fastest links, context by the length of its sequences, expert by the
experts it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import SEQUENCE
from graphaccel.ir.calls import counted_packet
from graphaccel.ir.replication.unfold import distinct_nodes, input_nodes
from graphaccel.ir.values import operands
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.pins import RECOMPUTE, RESHARDS, Pins, divisors
from graphaccel.planner.plan.plan import INTERLEAVES, Plan
from graphaccel.planner.search.solve import Problem
from graphaccel.schedule.table import SCHEDULE_NAMES

_FEW = 8  # devices up to which ZeRO is offered over every part of the data axis


_WORTH, _RESOLVED = 0.03, 1e-3


def weighed(seconds: Any, simple: Any = False) -> Any:
    """Seconds by which plans are compared: what shards more than the pins ask for (not `simple`)
    must save 3 % of a step, or a millisecond; the time model can not resolve less of short steps.
    Of numbers or columns."""
    return seconds + np.where(simple, 0.0, np.minimum(_WORTH * seconds, _RESOLVED))


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes that shard the graph itself."""

    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one stage of one replica together."""
        return self.tensor * self.context * self.expert

    @property
    def parent(self) -> Layout:
        """The layout with one axis less that approximates this one best: tensor has the most
        collectives."""
        if self.expert > 1:
            return replace(self, expert=1)
        return Layout(self.tensor) if self.context > 1 else Layout()


class Shape(NamedTuple):
    """One candidate before it is solved."""

    microbatches: int
    pipeline: int
    interleave: int
    recompute: str | tuple[str, ...]
    data: int
    zero: int = 0
    reshard_after_forward: str = "always"
    accumulation: str = "whole"
    tensor: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = "1f1b"
    shard_size: int = 0

    @property
    def order(self) -> tuple[object, ...]:
        """Tie-break: fewer microbatches, less pipeline, less of everything."""
        depth = RECOMPUTE.index(self.recompute) if isinstance(
            self.recompute, str) and self.recompute else 0  # fmt: skip
        return (self.microbatches, self.pipeline, self.interleave, depth, self.data, self.zero,
                RESHARDS.index(self.reshard_after_forward), self.accumulation, self.tensor,
                self.context, self.expert, SCHEDULE_NAMES.index(self.schedule),
                self.shard_size)  # fmt: skip

    @property
    def mesh(self) -> Shape:
        """This shape without its recompute choice."""
        return self._replace(recompute="")

    @property
    def layout(self) -> Layout:
        """The sizes of the axes that shard the graph itself."""
        return Layout(self.tensor, self.context, self.expert)

    @property
    def comparable(self) -> tuple[object, ...]:
        """What two shapes must share for `keeps_no_less` to compare them."""
        return self.layout, self.data, self.pipeline, self.schedule, self.shard_size

    def keeps_no_less(self, other: Shape) -> bool:
        """Whether a device holds at least as many bytes as with another shape, however much either
        recomputes: the shapes share the mesh, and this one shards no more and holds nothing for a
        shorter time."""
        if self.comparable != other.comparable:
            return False
        more = self.microbatches <= other.microbatches and self.interleave >= other.interleave
        # With a single microbatch, gradients are reduced as soon as they are computed.
        more = more and (self.microbatches > 1 or other.microbatches == 1
                         or other.accumulation == "shards")  # fmt: skip
        longer = (
            self.reshard_after_forward == other.reshard_after_forward
            or other.reshard_after_forward == "always"
        )
        whole = self.accumulation == other.accumulation or other.accumulation == "shards"
        return more and self.zero <= other.zero and longer and whole

    def microbatch_size(self, batch: int) -> int:
        """Examples in one microbatch on one data rank."""
        return batch // (self.data * self.microbatches)

    def on(self, base: Plan) -> Plan:
        """`base` with these decisions, still without cuts and recomputation. A pipeline has a
        min-cut only where it is pinned: programs of deep ones are then built from all layers."""
        decided = {k: v for k, v in self._asdict().items() if k != "recompute"}
        min_cut = base.min_cut and (self.pipeline == 1 or "min_cut" in base.pinned)
        return replace(base, **decided, min_cut=min_cut)


def plain(pins: Pins, shape: Shape | Plan) -> bool:
    """Whether nothing is sharded beyond the pins. Offloaded parameters count as a request to shard
    them, where there is a data axis."""
    return bool(plain_with(pins, Layout(shape.tensor, shape.context, shape.expert), shape.zero))


def plain_with(pins: Pins, layout: Layout, zero: Any) -> Any:
    """`plain` for a layout and a ZeRO level, or a column of levels."""
    asked = (zero == min(pins.zeros)) | ("parameters" in pins.on_host)
    return asked & (layout == base_layout(pins))


def base_layout(pins: Pins) -> Layout:
    """The layout with the pinned axes only."""
    return Layout(pins.tensor or 1, pins.context or 1, pins.expert or 1)


def layouts(problem: Problem, pins: Pins, batch: int) -> list[Layout]:
    """The candidate layouts, the pinned one first."""
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
    shape = [Layout(*sizes) for sizes in product(*choices)]
    return [base, *(x for x in shape if x != base and count % x.model_parallel_size == 0)]


def tensor_sizes(problem: Problem) -> tuple[int, ...]:
    """Divisors of the device count, up to the size of the fastest links, that divide the heads
    evenly."""
    step, cluster = problem.profile.step, problem.cluster
    heads, widths = set(), set()
    for node, _ in distinct_nodes(step.forward.graph):
        if "scaled_dot_product" in str(counted_packet(node)):
            heads.add(int(operands(node)[0].meta["val"].shape[1]))
    for value in _parameters(step).values():
        widths |= set(value.shape) if value.ndim > 1 else set()
    shared = heads or widths
    return tuple(
        n for n in divisors(cluster.count)
        if n == 1 or (n <= cluster.links[0].size and any(size % n == 0 for size in shared))
    )  # fmt: skip


def context_sizes(step: StepGraph, count: int) -> tuple[int, ...]:
    """Divisors of the device count that divide a sequence evenly."""
    length = step.sizes.get(SEQUENCE, 1)
    return tuple(n for n in divisors(count) if length % n == 0)


def expert_sizes(step: StepGraph, count: int) -> tuple[int, ...]:
    """Divisors of the device count that divide the experts evenly: rows of a weight of three
    dims."""
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
    """Every candidate of every candidate layout."""
    for layout in layouts(problem, pins, batch):
        yield from shapes_of(problem, pins, batch, layout)


def shapes_of(problem: Problem, pins: Pins, batch: int, layout: Layout) -> Iterator[Shape]:
    """Every candidate of one layout."""
    choices = recomputes(problem, pins)
    for mesh in meshes_of(problem, pins, batch, layout):
        for choice in choices:
            yield mesh._replace(recompute=choice)


def meshes_of(problem: Problem, pins: Pins, batch: int, layout: Layout) -> Iterator[Shape]:
    """Every candidate of one layout, without its recompute choice."""
    step, cluster = problem.profile.step, problem.cluster
    outer = cluster.count // layout.model_parallel_size
    asked = layout == base_layout(pins)
    for data in divisors(outer):
        pipeline = outer // data
        if min(pins.zeros) and data == 1:
            continue
        if pins.data not in (None, data) or pins.pipeline not in (None, pipeline):
            continue
        if batch % data or (pipeline > 1 and not step.has_loss):
            continue
        if problem.limits.data and data > 1:
            continue
        for interleave in _interleaves(pins, pipeline):
            if pipeline * interleave <= max((s for _, s in pins.stage_of or ()), default=0) > 0:
                continue
            for microbatches in divisors(batch // data):
                if pins.microbatches not in (None, microbatches):
                    continue
                if microbatches > 1 and (problem.limits.microbatches or not step.has_loss):
                    continue
                if not asked and batch // (data * microbatches) % layout.expert:
                    continue
                once = microbatches > 1 and problem.limits.head is not None
                for zero in _zeros(problem, pins, data, microbatches):
                    schedules = _schedules(pins, pipeline, interleave, zero[0])
                    if once:  # all forwards come before any backward
                        schedules = ("gpipe",) if interleave == 1 else ()
                    parts = _shards(problem, pins, data, layout.model_parallel_size, zero[0])
                    for schedule, shard in product(schedules, parts):
                        yield Shape(
                            microbatches, pipeline, interleave, "", data, *zero,
                            layout.tensor, layout.context, layout.expert, schedule, shard,
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
    return INTERLEAVES


def _schedules(pins: Pins, pipeline: int, interleave: int, zero: int) -> tuple[str, ...]:
    if pins.schedule is not None:
        return (pins.schedule,)
    if interleave > 1:
        return ("interleaved",)
    apart = pipeline > 1 and zero < 2 and pins.ort in (None, "auto", "off")
    apart = apart and not {"activations", "parameters"} & set(pins.on_host)
    return ("1f1b", "zero_bubble") if apart else ("1f1b",)


def _shards(problem: Problem, pins: Pins, data: int, replica: int, zero: int) -> tuple[int, ...]:
    """The numbers of devices of the data axis over which ZeRO may shard, as in `Plan.shard_size`.

    With a pinned level it is all of them, unless pinned otherwise: a pinned level is taken as a
    request to save memory.
    """
    if pins.shard_size is not None:
        sizes: tuple[int, ...] = (pins.shard_size,) if data % pins.shard_size == 0 else ()
    else:
        free = zero and pins.zero is None
        sizes = shard_sizes(problem.cluster, data, replica) if free else (data,)
    return tuple(0 if size == data else size for size in sizes)


def shard_sizes(cluster: Cluster, data: int, replica: int) -> tuple[int, ...]:
    """The numbers of devices of a data axis over which ZeRO may shard, all of them first.

    With few devices that is each part of the axis; with many, parts that fill a level of links
    together with the axes inside: up to there a larger part sends over the same links.
    """
    parts = [n for n in divisors(data) if 1 < n < data]
    if cluster.count > _FEW:
        full = {link.size // replica for link in cluster.links if link.size % replica == 0}
        parts = [n for n in parts if n in full]
    return (data, *parts)


def recomputes(problem: Problem, pins: Pins) -> tuple[str | tuple[str, ...], ...]:
    """The recompute choices."""
    if pins.recompute is not None:
        return (pins.recompute,)
    return ("none", "some", "all") if problem.profile.block_names else ("none",)


def _zeros(
    problem: Problem, pins: Pins, data: int, microbatches: int
) -> Iterator[tuple[int, str, str]]:
    """(zero, reshard_after_forward, accumulation), the pinned or default one first."""
    free = problem.shardable and problem.profile.step.has_loss and data > 1
    if "parameters" in pins.on_host and data > 1:  # in shards, and never held gathered
        if pins.zero == 3 or (pins.zero is None and free):
            yield from ((3, "always", each) for each in _accumulations(pins, 3, microbatches))
        return
    first = min(pins.zeros), pins.reshard_after_forward or "always", pins.accumulation or "whole"
    yield first
    for zero in pins.zeros:
        if (zero > first[0] and not free) or (zero == 3 and pins.cast_once):
            return
        reshards = _reshards(pins, zero, microbatches)
        choices = product((zero,), reshards, _accumulations(pins, zero, microbatches))
        yield from (choice for choice in choices if choice != first)


def _reshards(pins: Pins, zero: int, microbatches: int) -> tuple[str, ...]:
    """Values of `reshard_after_forward` at a level.

    With a pinned level, parameters are resharded after the forward unless pinned otherwise: a
    pinned level is taken as a request to save memory. "never" replaces "once_per_step" where there
    is one microbatch and parameters are gathered in float32: it then takes as much memory.
    """
    if pins.reshard_after_forward is not None:
        return (pins.reshard_after_forward,)
    if zero < 3 or pins.zero is not None:
        return ("always",)
    low = PRECISIONS[pins.precision or "fp32"].stream != "float32"
    return ("always", "once_per_step" if microbatches > 1 or low else "never")


def _accumulations(pins: Pins, zero: int, microbatches: int) -> tuple[str, ...]:
    """Values of `accumulation` at a level."""
    if pins.accumulation is not None:
        return (pins.accumulation,)
    return ("whole", "shards") if zero > 1 and microbatches > 1 else ("whole",)
