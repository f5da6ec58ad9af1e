"""Why a plan won, why the others lost, and what would make an impossible one fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from graphaccel.errors import GraphAccelError, InfeasiblePlan
from graphaccel.messages import format_bytes
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.offering import askable, offered
from graphaccel.planner.offload import host_excess, hosts, offload_text
from graphaccel.planner.pins import Pins
from graphaccel.planner.plan import Alternative, Plan, StageMemory
from graphaccel.planner.solve import Outcome, Problem, excess

TERMS: Mapping[str, str] = {"communication": "exposed communication"}
"""How terms of a prediction are called where their own name does not say enough."""

_ALTERNATIVES = 16  # meshes of which the best plan is kept beside the chosen one
_NO_BYTES = frozenset({"precision", "outputs", "bucket_bytes"})  # pins that are not let go of

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
    best: Plan, by_mesh: Mapping[tuple[int, ...], Plan], cluster: Cluster
) -> tuple[Alternative, ...]:
    """The best plan of other meshes, those that fit first, then the fastest."""
    others = [plan for key, plan in by_mesh.items() if key != mesh_key(best)]
    others.sort(key=lambda plan: (excess(plan, cluster) > 0, seconds(plan), plan.pipeline))
    return tuple(
        Alternative(plan.name, seconds(plan), fullest(plan).peak, lost_because(plan, best, cluster))
        for plan in others[:_ALTERNATIVES]
    )


def mesh_key(plan: Plan) -> tuple[int, ...]:
    """Equal for plans with the same mesh."""
    return (plan.data, plan.pipeline, plan.tensor, plan.context, plan.expert)


def lost_because(plan: Plan, best: Plan, cluster: Cluster) -> str:
    """Why `plan` lost: memory, or the term of its time that grew most."""
    missing = excess(plan, cluster)
    if missing > 0:
        if host_excess(plan, cluster) == missing:
            return f"its host does not fit by {format_bytes(missing)}"
        return f"does not fit by {format_bytes(missing)} on rank {fullest(plan).rank}"
    mine, theirs = plan.prediction, best.prediction
    assert mine is not None
    assert theirs is not None
    slower = (mine.seconds / theirs.seconds - 1) * 100
    if slower <= 0:  # as fast on paper; the exact memory decided
        return "does not fit once built"
    grown = {name: mine.terms[name] - theirs.terms.get(name, 0.0) for name in mine.terms}
    term = max(grown, key=lambda name: grown[name])
    more = grown[term]
    text = f"{more:.3g} s" if more >= 1 else f"{more * 1e3:.3g} ms"
    how = f"{slower:.0f}% slower" if slower < 900 else f"{slower / 100 + 1:.0f} times as long"
    return f"{how}: {TERMS.get(term, term)} +{text}"


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
        host=host_excess(closest, problem.cluster) + hosts(problem.cluster),
        host_memory=hosts(problem.cluster),
    )


def _relaxations(
    problem: Problem, pins: Pins, closest: Plan, batch: int, solve_all: SolveAll
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Each change alone: those that make it fit with their effect, and those that do not help."""
    works: list[tuple[str, str]] = []
    useless: list[str] = []

    def attempt(
        change: str, other: Problem, wanted: Pins, remark: str = "", batch: int = batch
    ) -> bool:
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
        if best.offload and wanted.offload is None:
            effect += f", {offload_text(best.offload)} on the host"
        works.append((change, f"{effect}{remark}"))
        return True

    for name in pins.names:
        if name == "offload":
            for spared in offered(replace(pins, offload=None), problem)[1:]:
                other = replace(pins, offload=spared)
                attempt(f"offload={offload_text(spared)}", problem, other)
        elif name not in _NO_BYTES:
            attempt(f"{name} not pinned", problem, replace(pins, **{name: None}))
    for offload in askable(pins, problem):
        asked = replace(pins, offload=offload)
        said = f"offload={offload_text(offload)}"
        if attempt(said, problem, asked, "; planned only, optimize() refuses it"):
            break
    axes = [axis for axis in closest.mesh if getattr(pins, axis) is not None]
    if len(axes) > 1:
        free = replace(pins, **dict.fromkeys(axes))
        attempt(f"{' and '.join(axes)} not pinned", problem, free)
    if pins.precision is None:
        low = replace(pins, precision="bf16")
        attempt("precision=bf16", problem, low, "; changes numerics")
    for size in (batch // 2, batch // 4, batch // 8):
        if size and attempt(f"batch {size}", problem, pins, batch=size):
            break
    free = replace(pins, **dict.fromkeys(axes))
    for factor in (2, 4, 8):
        wider = replace(problem, cluster=wider_cluster(problem.cluster, factor))
        if attempt(f"{wider.cluster.count} devices", wider, free):
            break
    top = fullest(closest)
    if top.peak > problem.cluster.device.memory:
        works.append((f"devices of {format_bytes(top.peak)}", closest.name))
    else:
        kept = host_excess(closest, problem.cluster) + hosts(problem.cluster)
        works.append((f"hosts of {format_bytes(kept)} for each device", closest.name))
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
