"""Solves with offload to the host where nothing fits without it, or where the step gets faster.

Where nothing fits otherwise, more and more is offloaded. Where something fits, but a candidate
ruled out by memory might be `WORTH_COPIES` times as fast, each offload choice is compared with it:
no published run shows how accurately copies and a step on the host are predicted, so they must gain
more than other things that are not pinned. A plan is never faster with offload than without
(`planner.plan.offload`): where memory rules out nothing that fast, nothing is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.capabilities import offered
from graphaccel.planner.search.reasons import seconds
from graphaccel.planner.search.solve import Outcome, Problem, excess

WORTH_COPIES = 1.1
"""The factor by which a step must be slower without offload."""
_MORE_COPIES = 1.03  # as much faster must a plan be that copies more
_GAP = (
    0.097  # of the best plan's seconds, within which candidates need not be solved: found to 0.2 %
)


def solve_as_needed(problem: Problem, pins: Pins, batch: int) -> Outcome:
    """`solve_all`; where nothing fits, again with more offloaded, and where something fits that
    memory makes slower, with the offload that pays, as `search` does."""
    results = [solve_all(problem, replace(pins, spared=()), batch)]
    if results[0].fitting:
        best = results[0].fitting[0]
        tried = [outcome for _, outcome in faster_on_host(problem, pins, batch, results[0], best)]
        return next((outcome for outcome in tried if outcome.fitting), results[0])
    for spared in offered(pins, problem, batch)[1:]:
        if results[-1].fitting:
            break
        results.append(solve_all(problem, replace(pins, spared=spared), batch))
    return (
        results[-1]
        if results[-1].fitting
        else min(results, key=lambda o: missing(o, problem.cluster))
    )


def goal_of(best: Plan) -> float:
    """Seconds that a plan with offload must not exceed to be chosen. best: the best plan without
    offload."""
    return seconds(best) / WORTH_COPIES


def missing(outcome: Outcome, cluster: Cluster) -> int:
    """Bytes by which the closest plan does not fit."""
    assert outcome.closest is not None
    return excess(outcome.closest, cluster)


def faster_on_host(
    problem: Problem, pins: Pins, batch: int, without: Outcome, best: Plan
) -> list[tuple[Pins, Outcome]]:
    """Pins and outcomes of the offload choices that were tried, the fastest first, and at the end
    those without a plan that is fast enough.

    without: the outcome without offload; best: the best of its plans. A choice with more copies
    must be that much faster. Nothing is tried where device and host share one memory."""
    host, goal = problem.cluster.host, goal_of(best)
    result, useless = [], []
    if host is None or host.shared or without.cramped > goal:
        close_gap([without])
        return []
    for spared in offered(pins, problem, batch)[1:]:
        wanted = replace(pins, spared=spared)
        outcome = solve_all(problem, wanted, batch, goal=goal, shared=without.shared)
        (result if outcome.fitting else useless).append((wanted, outcome))
        if outcome.fitting:
            goal = seconds(outcome.fitting[0]) / _MORE_COPIES
    close_gap([without, *(outcome for _, outcome in (*result, *useless))])
    return [*reversed(result), *useless]


def close_gap(outcomes: Sequence[Outcome]) -> None:
    """Solve what may be faster than the best of all by more than the gap."""
    for outcome in outcomes:
        best = min((seconds(each.fitting[0]) for each in outcomes if each.fitting), default=0.0)
        if outcome.rest is not None and outcome.open is not None:
            outcome.rest((1 - _GAP) * best, _GAP)
            outcome.rest = None
