"""Solve with as much on the host as it takes, or as pays.

Where nothing fits otherwise, more and more is kept there. Where something fits, but what memory
ruled out might be `WORTH_COPIES` times as fast, each way of keeping something there is tried
against it: no published run says how well copies and a step on the host are predicted, so they must
be worth more than other things that nobody asked for. A plan takes no less with them than without
(`planner.plan.offload`): where memory rules out nothing that fast, there is nothing to try.
"""

from __future__ import annotations

from dataclasses import replace

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.candidates import WORTH
from graphaccel.planner.search.capabilities import offered
from graphaccel.planner.search.reasons import seconds
from graphaccel.planner.search.solve import Outcome, Problem, excess

WORTH_COPIES = 1.1
"""How many times as long a step must take without."""


def solve_as_needed(problem: Problem, pins: Pins, batch: int) -> Outcome:
    """`solve_all`; where nothing fits, again with more on the host, and where something does that
    memory makes slower, with what pays, as `search` does."""
    found = [solve_all(problem, replace(pins, spared=()), batch)]
    if found[0].fitting:
        best = found[0].fitting[0]
        tried = [outcome for _, outcome in faster_on_host(problem, pins, batch, found[0], best)]
        return next((outcome for outcome in tried if outcome.fitting), found[0])
    for spared in offered(pins, problem, batch)[1:]:
        if found[-1].fitting:
            break
        found.append(solve_all(problem, replace(pins, spared=spared), batch))
    return found[-1] if found[-1].fitting else min(found, key=lambda o: missing(o, problem.cluster))


def goal_of(best: Plan) -> float:
    """Seconds that a plan with something on the host must not exceed to be worth it. best: with
    nothing there."""
    return seconds(best) / WORTH_COPIES


def missing(outcome: Outcome, cluster: Cluster) -> int:
    """Bytes by which the closest plan does not fit."""
    assert outcome.closest is not None
    return excess(outcome.closest, cluster)


def faster_on_host(
    problem: Problem, pins: Pins, batch: int, without: Outcome, best: Plan
) -> list[tuple[Pins, Outcome]]:
    """Pins and outcomes of what was tried on the host, the fastest first, at the end those of which
    no plan is worth it.

    without: of solving with nothing there; best: of these plans, the best. What copies more must be
    worth that. Nothing is tried where device and host have one memory."""
    host, goal = problem.cluster.host, goal_of(best)
    if host is None or host.shared or without.cramped > goal:
        return []
    found, useless = [], []
    for spared in offered(pins, problem, batch)[1:]:
        wanted = replace(pins, spared=spared)
        outcome = solve_all(problem, wanted, batch, goal=goal, shared=without.shared)
        (found if outcome.fitting else useless).append((wanted, outcome))
        if outcome.fitting:
            goal = seconds(outcome.fitting[0]) / WORTH
    return [*reversed(found), *useless]
