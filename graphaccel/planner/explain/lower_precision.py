"""How much faster a plan's mesh would be in bf16, where the precision was not pinned."""

from __future__ import annotations

from dataclasses import replace

from graphaccel.errors import GraphAccelError
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.efficiency import peak_flops
from graphaccel.planner.search.solve import Problem, with_cuts_and_blocks

_GAIN = 1.1  # a smaller one is not worth another precision


def bf16_gain(problem: Problem, plan: Plan) -> float | None:
    """How many times as fast the plan's mesh is predicted to be in bf16, with cuts and recomputed
    blocks chosen for it; None where the precision is pinned, the device has no faster bf16, or
    little is gained."""
    device, prediction = problem.cluster.device, plan.prediction
    faster = peak_flops(device, "bfloat16") > peak_flops(device, "float32")
    if (
        "precision" in plan.pinned
        or not problem.layouts.offered
        or prediction is None
        or not faster
    ):
        return None
    low = replace(plan.with_recomputed({}), precision=PRECISIONS["bf16"], cuts=())
    try:
        result = with_cuts_and_blocks(problem, low, "some" if plan.recomputed else "none", None)
    except GraphAccelError:  # this mesh has no such plan
        return None
    assert result.prediction is not None
    gain = prediction.seconds / result.prediction.seconds
    return gain if gain >= _GAIN else None
