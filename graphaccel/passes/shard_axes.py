"""Shard the joint graph over the context, tensor and expert mesh axes, one axis after another.

before (%w sharded on dim 1)                     after
  %t: f32[4,3] = aten.t(%w)                        %t: f32[2,3] = aten.t(%w)
  %mm: f32[8,3] = aten.mm(%x, %t)                  %narrow: f32[8,2] = aten.narrow(%x, 1, 0, 2)
  %tanh: f32[8,3] = aten.tanh(%mm)                 %mm: f32[8,3] = aten.mm(%narrow, %t)
                                                   %all_reduce: = all_reduce(%mm, sum, tensor)
                                                   %tanh: f32[8,3] = aten.tanh(%all_reduce)

The placements are the plan's (`Plan.axis_placements`), each stated for the graph that the axis
before it left, whose collectives are calls like any other.
"""

from __future__ import annotations

from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin, PlanMismatch
from graphaccel.planner.plan.axis_placements import by_name
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.local_graph import AXES, LocalGraph, mark_replicated, over_axis
from graphaccel.sharding.placement_names import NotPlaced, read


def shard_axes(graph: fx.GraphModule, step: StepGraph, plan: Plan) -> LocalGraph:
    """The joint graph as each rank of the tensor, context and expert axes runs it.

    With a tensor axis, meta "replicated" then says for each call whether its result is the same on
    all ranks of the axis.

    Raises PlanMismatch (GA204) for a graph with a call or parameter that the plan does not place,
    BadPin (GA202) for text that states no placement.
    """
    local, stated = LocalGraph(graph), dict(plan.axis_placements)
    for axis in AXES:
        ranks = plan.ranks(axis)
        if ranks == 1:
            continue
        try:
            texts = by_name(stated.get(axis, ()))
            placements = read(local.graph.graph, step.inputs, step.outputs, texts)
        except NotPlaced as error:
            missing = (f"{axis} placements", "of another model", str(error))
            raise PlanMismatch(path="plan", differences=(missing,)) from error
        except ValueError as error:
            raise BadPin(
                pin="axis_placements", value=axis, reason=str(error), plan="plan"
            ) from error
        local = over_axis(
            local, step, placements, axis=axis, ranks=ranks, keep_outputs=plan.outputs == "all"
        )
    if plan.tensor > 1:
        mark_replicated(local, step.inputs)
    return local
