"""Profiles of the graph that one device runs, by layout of the sharding axes and by precision.

Dividing the unsharded graph's numbers would be a guess: what is not divided, communicated or
gathered depends on the placement of every tensor, and its bytes on where the casts are. So the
graph is rewritten for the tensor, context and expert axes as it will run, and profiled like any
other. That costs about as much as a rewrite of the step, so each layout is built once, and only
when a search needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, TypeAlias

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.axis_rates import axis_rates
from graphaccel.planner.profile.lines import Lines
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True)
class LocalGraph:
    """The step as each rank of a layout runs it.

    step: its joint graph has local shapes and collectives; its sizes are in examples of a
    microbatch, where they are known as expressions. partial: parameter → axes over which its
    gradient is a partial sum. guessed: axis → calls that were not placed exactly. lines: of the
    joint graph, where the step's own is that of few layers.
    """

    step: StepGraph = field(repr=False)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    guessed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lines: Lines | None = field(default=None, repr=False)


def rates_of(cluster: Cluster, plan: Plan) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The rates by which placements on each axis of the plan are chosen (`Plan.rates`)."""
    axes = [axis for axis in ("tensor", "context", "expert") if getattr(plan, axis) > 1]
    return tuple((axis, astuple(axis_rates(cluster, plan, axis))) for axis in axes)


ShardGraph: TypeAlias = Callable[[Plan], LocalGraph]


class Layouts:
    """Profiles by layout, built on first use and cached."""

    def __init__(self, whole: Profile, shard_graph: ShardGraph | None = None) -> None:
        """shard_graph: rewrites the graph for a plan's precision and shards it over the plan's
        axes; None where no graph can be sharded, and every plan of one device is in the precision
        of `whole`."""
        self.whole = whole
        self.shard_graph = shard_graph
        self._made: dict[Any, tuple[Profile, LocalGraph]] = {}
        self._fixed: set[Any] = set()

    @property
    def offered(self) -> bool:
        """Whether there are layouts besides the unsharded graph."""
        return self.shard_graph is not None

    @property
    def count(self) -> int:
        """The number of profiles that were built."""
        return len(self._made)

    def known(self, plan: Plan) -> bool:
        """Whether the profile of `plan` is built."""
        return (
            plan.model_parallel_size == 1 or self._key(plan) in self._made
        )  # of one device: a cheap rewrite

    def of(self, plan: Plan) -> Profile:
        """The profile of the graph that a device of `plan` runs.

        Raises what sharding raises: BadPin (GA202), MissingRule (GA302). ValueError where
        `shard_graph` is None.
        """
        given = self.shard_graph is None or plan.precision.compute == "float32"
        return self.whole if plan.model_parallel_size == 1 and given else self._layout(plan)[0]

    def guessed(self, plan: Plan) -> Mapping[str, tuple[str, ...]]:
        """Axis → calls of the plan's layout that were not placed exactly."""
        return {} if plan.model_parallel_size == 1 else self._layout(plan)[1].guessed

    def _layout(self, plan: Plan) -> tuple[Profile, LocalGraph]:
        key = self._key(plan)
        if key not in self._made:
            if self.shard_graph is None:
                raise ValueError(f"nothing here can shard a graph for {plan_name(plan)}")
            local = self.shard_graph(plan)
            if BATCH not in local.step.sizes:  # one profile for each microbatch size
                self._fixed.add(_layout_of(plan))
                key = self._key(plan)
            compiled = self.whole.compiled
            profile = Profile(local.step, local.partial, local.lines, compiled=compiled)
            self._made[key] = profile, local
        return self._made[key]

    def _key(self, plan: Plan) -> Any:
        layout = _layout_of(plan)
        return (layout, plan.microbatch_size) if layout in self._fixed else layout


def _layout_of(plan: Plan) -> Any:
    axes = (plan.tensor, plan.context, plan.expert)
    uneven = plan.microbatch_size if plan.microbatch_size % plan.expert else 0
    request = plan.sequence, plan.context_by, plan.placements, plan.precision
    return (*axes, uneven, *request)
