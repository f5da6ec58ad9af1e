"""Shard the joint graph over the context, tensor and expert mesh axes, one axis after another.

Sharding rules describe one axis, so axes compose: each rewrites the graph that the one before it
left, with local shapes and with collectives that are calls like any other. Context comes first:
what tensor then splits along the sequence is a device's own range of it. The other way round a
device would have a piece of the range of each tensor rank, and every gather along the sequence
would have to reorder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from graphaccel.capture.export import GraphInput
from graphaccel.capture.stepgraph import Repeats, StepGraph
from graphaccel.errors import BadPin
from graphaccel.ir.program import Sharded
from graphaccel.ir.replicated import replicated
from graphaccel.ir.replication.layers import KEPT, Run, among
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.shard_axis import shard_axis
from graphaccel.sharding.apply.sharding_cache import Drafts
from graphaccel.sharding.rules.propagate import REPLICATED
from graphaccel.sharding.rules.shard import Placement, shard_of
from graphaccel.sharding.rules.solution import Placements
from graphaccel.sharding.solve.conversions import Counted, Rates
from graphaccel.sharding.solve.head_parallel import HeadsDoNotDivide
from graphaccel.sharding.solve.placements import solve_placements
from graphaccel.sharding.solve.transfer_placements import placed_alike

T = TypeVar("T")
AXES = ("context", "tensor", "expert")
# Without a cluster: an accelerator with 1 TB/s of memory and links of a tenth of that.
_REFERENCE = Rates(1e14, 1e12, 6.4e-10, 1e11, 6.4e-10)


@dataclass(frozen=True)
class LocalGraph:
    """graph: of one rank. resting: parameter -> splits, in the order in which they are applied.
    partial: parameter -> axes over which its gradient is a partial sum. guessed: names of calls
    whose placement is not exact, by axis. placed: what was placed on each axis, and its
    placements."""

    graph: fx.GraphModule = field(repr=False)
    resting: Mapping[str, tuple[Sharded, ...]]
    partial: Mapping[str, tuple[str, ...]]
    guessed: Mapping[str, tuple[str, ...]]
    placed: Mapping[str, tuple[fx.Graph, Placements]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Alike:
    """The sharded graph of the same step with `more` layers (1 or -1) of `run`, to copy from."""

    made: LocalGraph
    inputs: Sequence[GraphInput]
    run: Run
    more: int


def over_few(
    few: Repeats, make: Callable[[StepGraph, Alike | None], tuple[T, LocalGraph]]
) -> list[T]:
    """Results of `make` for the short step and for each longer one: the first longer step is
    solved, the others copy the placements of a step that differs by one layer."""
    runs = among(few.runs, (KEPT,) * len(few.runs))
    first, *others = few.longer
    longest, placed = make(first, None)
    least, told = make(few.short, Alike(placed, first.inputs, runs[0], 1))
    rest = zip(others, runs[1:], strict=True)
    twins = [(longer, Alike(told, few.short.inputs, run, -1)) for longer, run in rest]
    return [least, longest, *(make(longer, twin)[0] for longer, twin in twins)]


def shard_axes(
    graph: fx.GraphModule,
    step: StepGraph,
    plan: Plan,
    resting: Mapping[str, tuple[Sharded, ...]] | None = None,
    counted: Counted | None = None,
    drafts: Drafts | None = None,
    twin: Alike | None = None,
) -> LocalGraph:
    """The joint graph as each rank of the tensor, context and expert axes runs it.

    resting: how parameters are already sharded (programs for other batches, evaluation). counted:
    which costs count in the choice of placements; without it the graph is of one microbatch.
    drafts: for a graph that is measured and not run, the cache shared between such graphs. twin:
    tensors get the placements they have there, where the correspondence is unambiguous. With a
    tensor axis, meta "replicated" then says for each call whether its result is the same on all
    ranks of the axis.

    Raises BadPin (GA202) for placements that the graph does not allow.
    """
    found = LocalGraph(graph, {}, {}, {})
    if counted is None:
        size = plan.microbatch_size
        counted = Counted(late=size / plan.usual, examples=size)
    told = plan.placements, plan.sequence, plan.outputs, plan.context_by, plan.tensor_over_heads
    asked: tuple[object, ...] = (graph, *told, counted)
    for axis in AXES:
        ranks = getattr(plan, axis)
        if ranks == 1:
            continue
        asked = (*asked, axis, ranks, dict(plan.rates).get(axis))
        known = None if drafts is None else drafts.first.get(asked)
        if known is None:
            known = _over(axis, found, step, plan, resting, counted, drafts, twin)
            if drafts is not None and axis == AXES[0]:  # others may be derived from it
                drafts.first[asked] = known
        found = known
    if plan.tensor > 1:
        _tell_replicated(found, step)
    return found


def _tell_replicated(made: LocalGraph, step: StepGraph) -> None:
    graph = made.graph.graph
    inputs = zip(graph.find_nodes(op="placeholder"), step.inputs, strict=False)
    split = {
        node
        for node, spec in inputs
        if any(s.axis == "tensor" for s in made.resting.get(spec.name, ()))
    }
    alike = replicated(graph, "tensor", split)
    for node in graph.nodes:
        node.meta["replicated"] = node in alike


def _over(
    axis: str,
    before: LocalGraph,
    step: StepGraph,
    plan: Plan,
    resting: Mapping[str, tuple[Sharded, ...]] | None,
    counted: Counted,
    drafts: Drafts | None,
    twin: Alike | None,
) -> LocalGraph:
    """Shard the graph over one more axis."""
    graph, ranks, keep = before.graph, getattr(plan, axis), plan.outputs == "all"
    placed = None
    if twin is not None and axis in twin.made.placed:
        other, known = twin.made.placed[axis]
        placed = placed_alike(
            known, other, twin.inputs, graph.graph, step.inputs, twin.run, twin.more
        )
    pins = _pins(step, graph.graph, plan, axis, resting)
    rates = next((Rates(*v) for a, v in plan.rates if a == axis), _REFERENCE)
    try:
        placed = placed or solve_placements(
            graph.graph, step.inputs, step.outputs,
            axis=axis, ranks=ranks, rates=rates, pins=pins,
            sequence=plan.sequence, keep_outputs=keep, counted=counted,
            context_by=plan.context_by, inner=plan.tensor_over_heads,
        )  # fmt: skip
    except HeadsDoNotDivide as error:
        allowed = ("sequence",)
        raise BadPin(pin="context_by", value="heads", reason=str(error), allowed=allowed) from error
    except ValueError as error:
        raise BadPin(pin="placements", value=dict(plan.placements), reason=str(error)) from error
    made = shard_axis(
        graph, step.inputs, step.outputs, placed, axis=axis, ranks=ranks, keep_outputs=keep,
        fakes=None if drafts is None else drafts.fakes,
    )  # fmt: skip
    rests, partial, guessed = dict(before.resting), dict(before.partial), dict(before.guessed)
    for name, shard in made.held.items():
        rests[name] = (*rests.get(name, ()), Sharded(axis, shard.dim, shard.outer))
    for name in sorted(made.partial):
        partial[name] = (*partial.get(name, ()), axis)
    if placed.guessed:
        guessed[axis] = tuple(n.name for n in placed.guessed)
    every = {**before.placed, axis: (graph.graph, placed)}
    return LocalGraph(made.graph, rests, partial, guessed, every)


def _pins(
    step: StepGraph,
    graph: fx.Graph,
    plan: Plan,
    axis: str,
    resting: Mapping[str, tuple[Sharded, ...]] | None,
) -> dict[str, Placement]:
    """Placements that are fixed: by the user, or because parameters are already stored so."""
    if resting is not None:
        names = [spec.name for spec in step.inputs if spec.kind == "parameter"]
        splits = {name: resting.get(name, ()) for name in names}
    else:
        splits = dict(plan.placements)
    placeholders = zip(graph.find_nodes(op="placeholder"), step.inputs, strict=False)
    shapes = {spec.name: node.meta["val"].shape for node, spec in placeholders}
    found: dict[str, Placement] = {}
    for name, parts in splits.items():
        if name not in shapes:
            continue  # of a layer that another one represents here
        mine = [s for s in parts if s.axis == axis]
        if mine:
            ranks = getattr(plan, axis)
            found[name] = shard_of(mine[0].dim, mine[0].outer, shapes[name], ranks)
        else:  # a pin fixes all of it, except what ZeRO does on data
            found[name] = REPLICATED
    return found
