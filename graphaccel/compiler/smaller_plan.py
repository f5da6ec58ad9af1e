"""Finds pins with which a plan is predicted to need less memory, for the error of one that ran out.

Only the running plan is changed, a decision or two at a time, those that cost least time first; its
memory and theirs are predicted by the planner's closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from graphaccel.compiler.compiler import Compiler, Planned
from graphaccel.passes.microbatch.exact_microbatch import split_limits
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.offload import STAYING, host_excess, offload_text, read_offload
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.solve import Problem, with_cuts_and_blocks

_MARGIN = 0.9
"""Of the bytes that were not enough: what a smaller plan may be predicted to need."""


@dataclass(frozen=True)
class Smaller:
    """pins: of a plan that is predicted to need `tensors` bytes on its fullest rank, where the one
    that ran is predicted to need `instead_of` in the same way."""

    pins: dict[str, Any]
    tensors: int
    instead_of: int


def smaller_plan(compiler: Compiler, planned: Planned, room: int | None) -> Smaller | None:
    """The first change of the running plan that is predicted to fit where it did not.

    room: bytes that tensors could have on the device, where known.
    """
    step, plan = planned.step, planned.plan
    layouts, limits = compiler.layouts(step), split_limits(step)
    state = int(4 * compiler.model.optimizer_bytes)
    problem = Problem(
        layouts,
        planned.cluster,
        state,
        limits,
        compiler.model.shardable,
        (),
        compiler.step_memory(),
    )
    now = _tensors(problem.predicted(plan, simulated=False))
    bound = _MARGIN * (now if room is None else min(now, room))
    for changes in _changes(problem, plan):
        recompute = changes.get("recompute", plan.recompute)
        others = {name: value for name, value in changes.items() if name != "recompute"}
        if "offload" in others:
            others["offload"] = read_offload(others["offload"])
        other = replace(plan, recompute=(), selective=(), axis_placements=(), **others)
        smaller = with_cuts_and_blocks(problem, other, recompute, plan.cuts)
        needed = _tensors(smaller)
        if needed <= bound and _fits_host(smaller, planned.cluster):
            return Smaller({**_mesh(plan), **changes}, needed, now)
    return None


def _changes(problem: Problem, plan: Plan) -> Iterator[dict[str, Any]]:
    """Pins to change, those that cost least time first."""
    size = plan.batch // plan.data
    more = [] if problem.limits.microbatches else _divisors_above(plan.microbatches, size)
    every = not plan.selective and set(plan.recompute) == set(problem.profile.block_names)
    recomputed = [] if every or not problem.profile.block_names else [{"recompute": "all"}]
    zero = problem.shardable and plan.data > 1 and plan.zero < 3
    shards = [{"zero": 3}] if zero and problem.profile.step.has_loss else []
    microbatches = [{"microbatches": count} for count in more]
    yield from microbatches[:1]
    yield from recomputed
    for first in (*recomputed, {}):
        yield from (first | each for each in shards)
        yield from (first | each for each in microbatches)
        yield from (first | one | other for one in shards for other in microbatches)
    hosted = [{"offload": kinds} for kinds in _offloads(problem, plan)]
    yield from hosted
    for first in ({}, *shards):
        yield from (first | recompute | each for recompute in recomputed for each in hosted)
        yield from (first | other | each for other in microbatches[-1:] for each in hosted)


def _offloads(problem: Problem, plan: Plan) -> list[str]:
    """What the host could hold in place of the device, with parameters on the device; what takes
    the fewest copies first."""
    host = problem.cluster.host
    if plan.offload or host is None or host.shared:
        return []
    state = bool(problem.optimizer_bytes) and problem.shardable
    saved = problem.profile.step.has_loss and plan.schedule != "zero_bubble"
    possible = {"optimizer": state, "activations": saved, "optimizer+activations": state and saved}
    return [kinds for kinds in STAYING if possible.get(kinds)]


def _fits_host(plan: Plan, cluster: Cluster) -> bool:
    assert plan.prediction is not None
    return host_excess(plan.prediction.memory, cluster) <= 0


def _divisors_above(least: int, size: int) -> list[int]:
    return [count for count in range(least + 1, size + 1) if size % count == 0]


def _tensors(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(memory.tensors for memory in plan.prediction.memory)


def _mesh(plan: Plan) -> dict[str, Any]:
    """The pins of the running plan that divide the work, without those that change nothing."""
    axes = ("data", "pipeline", "tensor", "context", "expert", "microbatches")
    pins = {name: getattr(plan, name) for name in axes if getattr(plan, name) > 1}
    pins |= {"zero": plan.zero} if plan.zero else {}
    return pins | ({"offload": offload_text(plan.offload)} if plan.offload else {})
