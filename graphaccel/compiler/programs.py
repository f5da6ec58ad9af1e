"""The programs of a plan: the planner places what the plan does not, then the passes run.

Placements are a decision of the planner (`planner.placement`), made on the graph of one microbatch,
which passes make: so they are filled in here, where both are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import PlanMismatch
from graphaccel.ir.program import Sharded, StepProgram
from graphaccel.passes import pipeline
from graphaccel.passes.context import Context, Fixed, Sizes
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.passes.place_ort import Tools
from graphaccel.planner.placement.place import Placing, check_placements, place
from graphaccel.planner.plan.plan import Plan


@dataclass(frozen=True)
class Target:
    """What a program is built for besides its plan: as `passes.pipeline.build` takes it."""

    sizes: Sizes | None = None
    homes: Mapping[str, tuple[int, ...]] | None = None
    gradients: bool = True
    parameter_shards: Mapping[str, tuple[Sharded, ...]] | None = None
    groups: tuple[tuple[str, ...], ...] | None = None
    ranks: int | None = None
    ort: Tools | None = None
    device: str = "cpu"


def build(step: StepGraph, plan: Plan, **target: Any) -> StepProgram:
    """The programs of a plan whose placements may be missing. target: fields of `Target`."""
    return placed_programs(step, plan, Target(**target))[1]


def placed_programs(
    step: StepGraph, plan: Plan, target: Target, path: str = "plan", *, checked: bool = False
) -> tuple[Plan, StepProgram]:
    """The plan with its placements, which are checked where it has some, and its programs.

    path: what errors call the plan. checked: the placements were chosen, or checked, on another
    rank, for the same step.

    Raises BadPin (GA202), PlanMismatch (GA204), and what `passes.pipeline.build` raises.
    """
    run = partial(
        pipeline.build, step, sizes=target.sizes, homes=target.homes, gradients=target.gradients,
        parameter_shards=target.parameter_shards, groups=target.groups, ranks=target.ranks,
        ort=target.ort, device=target.device,
    )  # fmt: skip
    if plan.axis_placements:
        if not checked:
            check_placements(_placing(step, plan, target), path)
        return plan, run(plan)
    placed = with_placements(step, plan, target)
    try:
        return placed, run(placed)
    except PlanMismatch:  # placed with few layers, which then are not those of all
        if step.repeats is None or target.parameter_shards is not None:
            raise
    placed = place(replace(_placing(step, plan, target), all_layers=True))
    return placed, run(placed)


def with_placements(step: StepGraph, plan: Plan, target: Target | None = None) -> Plan:
    """The plan with the placements that the planner chooses; solved once for all plans that split
    the step in the same way. Raises BadPin (GA202)."""
    if plan.model_parallel_size == 1:
        return plan
    target = target or Target()
    placing = _placing(step, plan, target)
    if target.parameter_shards is not None:
        return place(placing)
    split = (plan.data, plan.microbatches, plan.batch, plan.tensor, plan.context, plan.expert)
    pins = (plan.placements, plan.rates, plan.sequence, plan.context_by, plan.outputs, plan.devices)
    request = split, pins, frozenset((target.sizes or {}).items())
    placed = placing.step.analyses.cached(request, place, placing)
    return replace(plan, axis_placements=placed.axis_placements)


def _placing(step: StepGraph, plan: Plan, target: Target) -> Placing:
    context = Context(
        step, plan, target.sizes, target.gradients, Fixed(parameter_shards=target.parameter_shards)
    )
    for each in pipeline.PIPELINE:
        if each.level == "step":
            context = each.run(context)
    return Placing(context.step, plan, partial(_part, plan, target), target.parameter_shards)


def _part(plan: Plan, target: Target, step: StepGraph) -> fx.GraphModule:
    """The graph of one microbatch."""
    return exact_microbatch(step, plan, target.sizes).graph
