"""Why a plan won, why the others lost, and what would make an impossible one fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from graphaccel.errors import GraphAccelError, InfeasiblePlan
from graphaccel.messages import format_bytes
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.pins import Pins
from graphaccel.planner.plan import Alternative, Plan, StageMemory
from graphaccel.planner.solve import Outcome, Problem, excess

SolveAll = Callable[[Problem, Pins, int], Outcome]


def fullest(plan: Plan) -> StageMemory:
    """The rank with the highest peak."""
    assert plan.prediction is not None
    return max(plan.prediction.memory, key=lambda m: (m.peak, -m.rank))


def seconds(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None
    return plan.prediction.seconds


def alternatives(
    best: Plan, by_mesh: Mapping[tuple[int, int], Plan], cluster: Cluster
) -> tuple[Alternative, ...]:
    """The best plan of every other mesh, those that fit first, then the fastest."""
    others = [plan for key, plan in by_mesh.items() if key != (best.data, best.pipeline)]
    others.sort(key=lambda plan: (excess(plan, cluster) > 0, seconds(plan), plan.pipeline))
    return tuple(
        Alternative(plan.name, seconds(plan), fullest(plan).peak, _reason(plan, best, cluster))
        for plan in others
    )


def _reason(plan: Plan, best: Plan, cluster: Cluster) -> str:
    """Why `plan` lost: memory, or the term of its time that grew most."""
    missing = excess(plan, cluster)
    if missing > 0:
        return f"does not fit by {format_bytes(missing)} on rank {fullest(plan).rank}"
    mine, theirs = plan.prediction, best.prediction
    assert mine is not None
    assert theirs is not None
    slower = (mine.seconds / theirs.seconds - 1) * 100
    if slower <= 0:  # as fast on paper; the exact memory decided
        return "does not fit once built"
    terms = {
        "compute": mine.compute - theirs.compute,
        "exposed communication": mine.communication - theirs.communication,
        "bubble": mine.bubble - theirs.bubble,
        "optimizer": mine.optimizer - theirs.optimizer,
    }
    term = max(terms, key=lambda name: terms[name])
    return f"{slower:.0f}% slower: {term} +{terms[term] * 1e3:.3g} ms"


def infeasible(
    problem: Problem,
    pins: Pins,
    outcome: Outcome,
    batch: int,
    solve_all: SolveAll,
    corrected: Problem,
) -> InfeasiblePlan:
    """The error for a problem without a plan, with the single changes that would give one.

    corrected: the problem in which changes are tried (`solve.scaled` where the estimate was too
    low).
    """
    closest = outcome.closest
    assert closest is not None
    top = fullest(closest)
    works, useless = _relaxations(corrected, pins, closest, batch, solve_all)
    return InfeasiblePlan(
        devices=problem.cluster.count,
        memory=problem.cluster.device.memory,
        peak=top.peak,
        stage=top.rank,
        closest=closest.name,
        breakdown={
            "param": top.parameter,
            "grad": top.gradient,
            "optstate": top.optimizer,
            "activ": top.activation,
            "temp": top.temporary,
            "other": top.other,
        },
        relaxations=works,
        useless=useless,
    )


def _relaxations(
    problem: Problem, pins: Pins, closest: Plan, batch: int, solve_all: SolveAll
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Each change alone: those that make it fit with their effect, and those that do not help."""
    works: list[tuple[str, str]] = []
    useless: list[str] = []

    def attempt(change: str, other: Problem, wanted: Pins, remark: str = "") -> bool:
        try:
            found = solve_all(other, wanted, batch)
        except GraphAccelError:  # this change can not be planned at all
            return False
        if not found.fitting:
            useless.append(change)
            return False
        best = found.fitting[0]
        assert best.prediction is not None
        effect = f"peak {format_bytes(fullest(best).peak)}, {best.prediction.seconds * 1e3:.3g} ms"
        works.append((change, f"{effect}{remark}"))
        return True

    for name in ("recompute", "microbatches", "pipeline", "data", "interleave", "schedule", "cuts"):
        if getattr(pins, name) is not None:
            attempt(f"{name} not pinned", problem, replace(pins, **{name: None}))
    if pins.data is not None and pins.pipeline is not None:
        attempt("data and pipeline not pinned", problem, replace(pins, data=None, pipeline=None))
    if pins.precision is None:
        low = replace(pins, precision="bf16")
        attempt("precision=bf16", problem, low, "; changes numerics")
    free = replace(pins, data=None, pipeline=None)
    for factor in (2, 4, 8):
        wider = replace(problem, cluster=wider_cluster(problem.cluster, factor))
        if attempt(f"{wider.cluster.count} devices", wider, free):
            break
    memory = fullest(closest).peak
    works.append((f"devices of {format_bytes(memory)}", closest.name))
    if closest.recompute and set(closest.recompute) == set(problem.profile.block_names):
        useless.append("more recomputation (already all blocks)")
    if closest.microbatch_size == 1:
        useless.append("smaller microbatches (already 1)")
    return tuple(works), tuple(dict.fromkeys(useless))


def wider_cluster(cluster: Cluster, factor: int) -> Cluster:
    """The same devices, `factor` times as many, over the links there are."""
    count = cluster.count * factor
    *inner, last = cluster.links
    return replace(cluster, count=count, links=(*inner, replace(last, size=max(last.size, count))))
