"""Solve, or check, the placements of a graph on the context, tensor and expert axes in turn.

Sharding rules describe one axis, so axes compose: each is solved on the graph that the one before
it left, with local shapes and with collectives that are calls like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from graphaccel.capture.export.export import GraphInput
from graphaccel.capture.stepgraph import Repeats, StepGraph
from graphaccel.errors import BadPin
from graphaccel.ir.program import Sharded
from graphaccel.ir.replication.layers import KEPT, Run, among
from graphaccel.planner.plan.axis_placements import AxisPlacements, by_name
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.local_graph import AXES, LocalGraph, mark_replicated, over_axis
from graphaccel.sharding.apply.sharding_cache import ShardingCache
from graphaccel.sharding.placement_names import read
from graphaccel.sharding.rules.batch_placement import REPLICATED
from graphaccel.sharding.rules.shard import Placement, shard_of
from graphaccel.sharding.rules.solution import Placements
from graphaccel.sharding.solve.check_placements import checked
from graphaccel.sharding.solve.conversions import Counted, Rates
from graphaccel.sharding.solve.head_parallel import HeadsDoNotDivide
from graphaccel.sharding.solve.placements import placement_problem, solve_placements
from graphaccel.sharding.solve.transfer_placements import transferred_placements

T = TypeVar("T")
# Without a cluster: an accelerator with 1 TB/s of memory and links of a tenth of that.
_REFERENCE = Rates(1e14, 1e12, 6.4e-10, 1e11, 6.4e-10)


@dataclass(frozen=True)
class SolvedGraph:
    """local: the sharded graph. placed: axis → the graph that was placed on it, and its
    placements."""

    local: LocalGraph
    placed: Mapping[str, tuple[fx.Graph, Placements]] = field(default_factory=dict, repr=False)

    @property
    def guessed(self) -> dict[str, tuple[str, ...]]:
        """Axis → names of the calls that were not placed exactly."""
        results = {axis: placements.guessed for axis, (_, placements) in self.placed.items()}
        return {axis: tuple(n.name for n in nodes) for axis, nodes in results.items() if nodes}


@dataclass(frozen=True)
class Transfer:
    """The solved graph of the same step with `more` layers (1 or -1) of `run`, to copy from."""

    solved: SolvedGraph
    inputs: Sequence[GraphInput]
    run: Run
    more: int


@dataclass(frozen=True)
class Request:
    """What a graph is solved for.

    parameter_shards: how parameters are already sharded (programs for other batches, evaluation).
    counted: which costs count; without it the graph is of one microbatch. given: axis → placements
    to check instead of solving. cache: for a graph that is measured and not run, the cache shared
    between such graphs. applied: whether the last axis is applied too."""

    plan: Plan
    parameter_shards: Mapping[str, tuple[Sharded, ...]] | None = None
    counted: Counted | None = None
    given: Mapping[str, AxisPlacements] | None = None
    cache: ShardingCache | None = None
    applied: bool = True

    @property
    def costs(self) -> Counted:
        """Which costs count."""
        if self.counted is not None:
            return self.counted
        size = self.plan.microbatch_size
        return Counted(late=size / self.plan.usual, examples=size)


def over_few(
    few: Repeats, make: Callable[[StepGraph, Transfer | None], tuple[T, SolvedGraph]]
) -> list[T]:
    """Results of `make` for the short step and for each longer one: the first longer step is
    solved, the others copy the placements of a step that differs by one layer."""
    runs = among(few.runs, (KEPT,) * len(few.runs))
    first, *others = few.longer
    longest, solved = make(first, None)
    least, short = make(few.short, Transfer(solved, first.inputs, runs[0], 1))
    rest = zip(others, runs[1:], strict=True)
    transfers = [(longer, Transfer(short, few.short.inputs, run, -1)) for longer, run in rest]
    return [least, longest, *(make(longer, transfer)[0] for longer, transfer in transfers)]


def solve_axes(
    graph: fx.GraphModule, step: StepGraph, request: Request, transfer: Transfer | None = None
) -> SolvedGraph:
    """The placements of a joint graph on each axis of the plan, and the graph sharded by them.

    transfer: tensors get the placements they have there, where the correspondence is unambiguous.

    Raises BadPin (GA202) for pins or given placements that the graph does not allow, NotPlaced for
    given ones that leave out a call.
    """
    plan, cache = request.plan, request.cache
    result = SolvedGraph(LocalGraph(graph))
    pins = plan.placements, plan.sequence, plan.outputs, plan.context_by, plan.tensor_over_heads
    asked: tuple[object, ...] = (graph, *pins, request.costs)
    axes = [axis for axis in AXES if plan.ranks(axis) > 1]
    for axis in axes:
        asked = (*asked, axis, plan.ranks(axis), dict(plan.rates).get(axis))
        known = None if cache is None else cache.first.get(asked)
        if known is None:
            applied = request.applied or axis != axes[-1]
            known = _over(axis, result, step, request, transfer, applied)
            if cache is not None and axis == AXES[0]:  # others may be derived from it
                cache.first[asked] = known
        result = known
    if plan.tensor > 1 and request.applied:
        mark_replicated(result.local, step.inputs)
    return result


def _over(
    axis: str,
    before: SolvedGraph,
    step: StepGraph,
    request: Request,
    transfer: Transfer | None,
    applied: bool,
) -> SolvedGraph:
    """Solve one more axis, and shard the graph over it."""
    local, plan, cache = before.local, request.plan, request.cache
    graph, placements = local.graph.graph, None
    if transfer is not None and axis in transfer.solved.placed:
        other, known = transfer.solved.placed[axis]
        placements = transferred_placements(
            known, other, transfer.inputs, graph, step.inputs, transfer.run, transfer.more
        )
    placements = placements or _placements(axis, graph, step, request)
    if applied:
        local = over_axis(
            local, step, placements, axis=axis, ranks=plan.ranks(axis),
            keep_outputs=plan.outputs == "all", fakes=None if cache is None else cache.fakes,
        )  # fmt: skip
    return SolvedGraph(local, {**before.placed, axis: (graph, placements)})


def _placements(axis: str, graph: fx.Graph, step: StepGraph, request: Request) -> Placements:
    """The cheapest placements on an axis, or the given ones if they are possible."""
    plan = request.plan
    pins = _pins(step, graph, plan, axis, request.parameter_shards)
    rates = next((Rates(*values) for name, values in plan.rates if name == axis), _REFERENCE)
    options = {
        "axis": axis, "ranks": plan.ranks(axis), "rates": rates, "pins": pins,
        "sequence": plan.sequence, "keep_outputs": plan.outputs == "all",
        "counted": request.costs, "context_by": plan.context_by, "inner": plan.tensor_over_heads,
    }  # fmt: skip
    try:
        if request.given is None:
            return solve_placements(graph, step.inputs, step.outputs, **options)
        problem = placement_problem(graph, step.inputs, step.outputs, **options)
    except HeadsDoNotDivide as error:
        allowed = ("sequence",)
        raise BadPin(pin="context_by", value="heads", reason=str(error), allowed=allowed) from error
    except ValueError as error:
        raise BadPin(pin="placements", value=dict(plan.placements), reason=str(error)) from error
    texts = by_name(request.given[axis])
    return checked(problem, read(graph, step.inputs, step.outputs, texts), step.inputs, texts)


def _pins(
    step: StepGraph,
    graph: fx.Graph,
    plan: Plan,
    axis: str,
    parameter_shards: Mapping[str, tuple[Sharded, ...]] | None,
) -> dict[str, Placement]:
    """Placements that are fixed: by the user, or because parameters are already stored so."""
    if parameter_shards is not None:
        names = [spec.name for spec in step.inputs if spec.kind == "parameter"]
        splits = {name: parameter_shards.get(name, ()) for name in names}
    else:
        splits = dict(plan.placements)
    placeholders = zip(graph.find_nodes(op="placeholder"), step.inputs, strict=False)
    shapes = {spec.name: node.meta["val"].shape for node, spec in placeholders}
    results: dict[str, Placement] = {}
    for name, parts in splits.items():
        if name not in shapes:
            continue  # of a layer that another one represents here
        mine = [s for s in parts if s.axis == axis]
        if mine:
            ranks = plan.ranks(axis)
            results[name] = shard_of(mine[0].dim, mine[0].outer, shapes[name], ranks)
        else:  # a pin fixes all of it, except what ZeRO does on data
            results[name] = REPLICATED
    return results
