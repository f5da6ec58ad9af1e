"""Fill in, or check, the placements of a plan (`Plan.axis_placements`).

A step that was captured with few of its layers is solved with few: the first longer step is, the
others copy its placements, and what they agree on holds for all layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin, GraphAccelError, PlanMismatch
from graphaccel.ir.program import Sharded
from graphaccel.ir.replication.layers import KEPT, NotRepeated
from graphaccel.planner.placement.solve_axes import Request, SolvedGraph, over_few, solve_axes
from graphaccel.planner.plan.axis_placements import AxisPlacements, all_layers, few_layers, grouped
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.local_graph import AXES
from graphaccel.sharding.placement_names import NotPlaced, written

log = logging.getLogger("graphaccel.planner")
Stated: TypeAlias = dict[str, AxisPlacements]


@dataclass(frozen=True)
class Placing:
    """What is placed.

    step: in the plan's precision and with its fusions. part: step → its graph of one microbatch.
    parameter_shards: how parameters are already sharded. all_layers: whether a step that was
    captured with few layers is solved with all of them."""

    step: StepGraph
    plan: Plan
    part: Callable[[StepGraph], fx.GraphModule]
    parameter_shards: Mapping[str, tuple[Sharded, ...]] | None = None
    all_layers: bool = False


def place(placing: Placing) -> Plan:
    """The plan with the cheapest placements. Raises BadPin (GA202) for pins that no placement
    satisfies."""
    result = _over_steps(placing, None)
    return replace(placing.plan, axis_placements=tuple(sorted(result.items())))


def check_placements(placing: Placing, path: str) -> None:
    """Check the placements of a plan. path: what errors call the plan.

    Raises PlanMismatch (GA204) where they are not of this step, BadPin (GA202) where they are not
    possible.
    """
    plan = placing.plan
    stated, needed = dict(plan.axis_placements), [a for a in AXES if plan.ranks(a) > 1]
    if sorted(stated) != sorted(needed) or len(stated) != len(plan.axis_placements):
        reason = f"it has those of each of: {', '.join(needed) or 'no axis'}"
        raise BadPin(pin="axis_placements", value=list(stated), reason=reason, plan=path)
    try:
        _over_steps(placing, stated)
    except NotPlaced as error:
        raise PlanMismatch(path=path, differences=(("placements", "", str(error)),)) from error
    except ValueError as error:
        raise BadPin(
            pin="axis_placements", value=_short(stated), reason=str(error), plan=path
        ) from error


def _over_steps(placing: Placing, given: Stated | None) -> Stated:
    """Solve, or check, with few layers where the step was captured so, else with all."""
    step, plan = placing.step, placing.plan
    few = step.repeats is not None and placing.parameter_shards is None and not placing.all_layers
    if few and step.even(dict(plan.placements)):
        try:
            return _few(placing, given)
        except (NotRepeated, GraphAccelError) as reason:
            log.info("all layers are placed: %s", reason)
    request = Request(plan, placing.parameter_shards, given=given, applied=False)
    solved = solve_axes(placing.part(step), step, request)
    return _stated(step, solved)


def _few(placing: Placing, given: Stated | None) -> Stated:
    """Solve, or check, the steps of few layers. Raises NotRepeated where they do not agree."""
    few = placing.step.repeats
    assert few is not None

    def make(step: StepGraph, transfer: object) -> tuple[Stated, SolvedGraph]:
        more = few.longer.index(step) if step is not few.short else -1
        counts = [KEPT + (i == more) for i in range(len(few.runs))]
        own = given and {axis: few_layers(p, few.runs, counts) for axis, p in given.items()}
        request = Request(placing.plan, given=own, applied=False)
        solved = solve_axes(placing.part(step), step, request, None if given else transfer)  # type: ignore[arg-type]
        if solved.guessed:
            raise NotRepeated("some calls are not placed exactly")
        stated = _stated(step, solved)
        return {a: all_layers(p, few.runs, counts) for a, p in stated.items()}, solved

    result = over_few(few, make)
    if any(other != result[0] for other in result[1:]):
        raise NotRepeated("the placements depend on the number of layers")
    return result[0]


def _stated(step: StepGraph, solved: SolvedGraph) -> Stated:
    """Placements as a plan states them."""
    return {
        axis: grouped(written(graph, step.inputs, placements))
        for axis, (graph, placements) in solved.placed.items()
    }


def _short(stated: Stated) -> str:
    return " and ".join(f"the placements on {axis}" for axis in stated)
