"""Explains why a plan won, why the others lost, and what would make an impossible one fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from graphaccel.errors import GraphAccelError, InfeasiblePlan
from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.catalogue import cluster as named_cluster
from graphaccel.planner.cluster.catalogue import device_names
from graphaccel.planner.cluster.cluster import MOST_DEVICES, Cluster
from graphaccel.planner.plan.offload import host_excess, hosts, offload_text
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.prediction import Alternative, StageMemory
from graphaccel.planner.search.candidates import weighed
from graphaccel.planner.search.capabilities import offered
from graphaccel.planner.search.solve import Outcome, Problem, excess

TERMS: Mapping[str, str] = {"communication": "exposed communication"}
"""Longer names for terms of a prediction whose own name is not clear."""

_ALTERNATIVES = 16  # meshes whose best plan is listed beside the chosen one
_ROUNDS = 6  # in which memory grows until a plan fits
_NO_BYTES = frozenset({"precision", "outputs", "bucket_bytes"})  # pins that are never relaxed

SolveAll = Callable[[Problem, Pins, int], Outcome]
Refine = Callable[[Plan], Plan]


def fullest(plan: Plan) -> StageMemory:
    """The rank with the highest peak."""
    assert plan.prediction is not None
    return max(plan.prediction.memory, key=lambda m: (m.peak, -m.rank))


def seconds(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None
    return plan.prediction.seconds


def time_text(took: float) -> str:
    """Seconds in three digits, as seconds or milliseconds."""
    if took >= 999.5:
        return f"{took:,.0f} s"
    return f"{took:.3g} s" if took >= 0.9995 else f"{took * 1e3:.3g} ms"


def alternatives(
    best: Plan,
    by_mesh: Mapping[tuple[int, ...], Plan],
    cluster: Cluster,
    corrected: Cluster | None = None,
    refused: Collection[Plan] = (),
    larger: Collection[tuple[int, ...]] = (),
) -> tuple[Alternative, ...]:
    """The best plan of each other mesh, those that fit first, then the fastest.

    corrected: the cluster with device memory reduced by the error of the memory estimate. refused:
    decisions of plans that were built, and did not fit or could not run. larger: kinds of plans
    (`kind_of`) of which some turned out larger than estimated.
    """

    def reason(plan: Plan) -> str:
        if excess(plan, cluster) <= 0 and plan.decided(notes=()) in refused:
            return "was built, and does not fit or can not run"
        same_kind = kind_of(plan) in larger
        if same_kind and excess(plan, cluster) <= 0 < excess(plan, corrected or cluster):
            return "would not fit: plans like it turned out larger once built"
        return lost_because(plan, best, cluster)

    others = [plan for key, plan in by_mesh.items() if key != mesh_key(best)]
    others.sort(key=lambda plan: (excess(plan, cluster) > 0, seconds(plan), plan.pipeline))
    return tuple(
        Alternative(plan_name(plan), seconds(plan), fullest(plan).peak, reason(plan))
        for plan in others[:_ALTERNATIVES]
    )


def mesh_key(plan: Plan) -> tuple[int, ...]:
    """Equal for plans with the same mesh."""
    return (plan.data, plan.pipeline, plan.tensor, plan.context, plan.expert)


def kind_of(plan: Plan) -> tuple[int, ...]:
    """Equal for plans whose estimates of memory are off alike: of one mesh and level of ZeRO."""
    return (*mesh_key(plan), plan.zero)


def lost_because(plan: Plan, best: Plan, cluster: Cluster) -> str:
    """Why `plan` lost: memory, the term of its time that grew most, or that it is no better."""
    missing = excess(plan, cluster)
    if missing > 0:
        if _host_excess(plan, cluster) == missing:
            return f"its host does not fit by {format_bytes(missing)}"
        return f"does not fit by {format_bytes(missing)} on rank {fullest(plan).rank}"
    mine, theirs = plan.prediction, best.prediction
    assert mine is not None
    assert theirs is not None
    slower = (mine.seconds / theirs.seconds - 1) * 100
    if slower <= 0:
        return no_slower(1 - mine.seconds / theirs.seconds, theirs.seconds)
    grown = {name: mine.terms[name] - theirs.terms.get(name, 0.0) for name in mine.terms}
    term = max(grown, key=lambda name: grown[name])
    more = grown[term]
    how = f"{slower:.0f}% slower" if slower < 900 else f"{slower / 100 + 1:.0f} times as long"
    return f"{how}: {TERMS.get(term, term)} +{time_text(more)}"


def no_slower(gain: float, took: float, but: str = "") -> str:
    """Why a plan that fits and takes no longer was not chosen. gain: the share of the step it
    saves. took: seconds of the chosen one. but: what is wrong with it, if anything."""
    said = f"{gain:.0%} faster" if gain >= 0.005 else "as fast"
    if but:
        return f"{said}, but {but}"
    if gain < 0.005:
        return f"{said}: ties go to the simpler plan"
    if weighed((1 - gain) * took) > took:
        return f"{said}, which is too little to be sure of and to shard more for"
    return said


def infeasible(
    problem: Problem,
    pins: Pins,
    outcome: Outcome,
    batch: int,
    solve_all: SolveAll,
    corrected: Problem,
    refine: Refine | None = None,
) -> InfeasiblePlan:
    """The error for a problem without a plan, with the single changes that would give one.

    corrected: the problem in which changes are tried (`solve.scaled` where the estimate was too
    low). refine: builds a plan and returns it with exact memory; None: the estimate counts.
    """
    closest = outcome.closest
    assert closest is not None
    top = fullest(closest)
    costs, useless = _relaxations(problem, corrected, pins, closest, batch, solve_all, refine)
    return InfeasiblePlan(
        devices=problem.cluster.count,
        memory=problem.cluster.device.memory,
        peak=top.peak,
        stage=top.rank,
        closest=plan_name(closest),
        breakdown={
            "param": top.parameter,
            "grad": top.gradient,
            "optstate": top.optimizer,
            "activ": top.activation,
            "temp": top.temporary,
            "other": top.other,
        },
        relaxations=costs,
        useless=useless,
        host=_host_excess(closest, problem.cluster) + hosts(problem.cluster),
        host_memory=hosts(problem.cluster),
    )


@dataclass
class _Changes:
    """Changes that were tried: those that make a plan fit with their effect, and those that do not
    help."""

    solve_all: SolveAll
    batch: int
    helpful: list[tuple[str, str]] = field(default_factory=list)
    useless: list[str] = field(default_factory=list)

    def attempt(
        self, change: str, problem: Problem, pins: Pins, remark: str = "", batch: int | None = None
    ) -> bool:
        """Whether a plan fits with one change; one that cannot be planned at all is left out."""
        try:
            outcome = self.solve_all(problem, pins, self.batch if batch is None else batch)
        except GraphAccelError:
            return False
        if not outcome.fitting:
            self.useless.append(change)
            return False
        self.helpful.append((change, f"{_effect(outcome.fitting[0], pins)}{remark}"))
        return True


def _relaxations(
    asked: Problem,
    problem: Problem,
    pins: Pins,
    closest: Plan,
    batch: int,
    solve_all: SolveAll,
    refine: Refine | None,
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Each change alone: those that make it fit with their effect, and those that do not help.

    asked: with the devices as they are; problem: with the devices that changes are tried on.
    """
    tried = _Changes(solve_all, batch)
    axes = [axis for axis in closest.mesh if getattr(pins, axis) is not None]
    free = replace(pins, **dict.fromkeys(axes))
    _without_pins(tried, problem, pins)
    if len(axes) > 1:
        tried.attempt(f"{' and '.join(axes)} not pinned", problem, free)
    if pins.precision is None:
        low = replace(pins, precision="bf16")
        tried.attempt("precision=bf16", problem, low, "; changes numerics")
    for size in (batch // 2, batch // 4, batch // 8):
        if size and tried.attempt(f"batch {size}", problem, pins, batch=size):
            break
    _wider_clusters(tried, asked, problem, free)
    enough = _enough(asked, pins, closest, batch, solve_all, refine)
    if enough is not None:
        tried.helpful.append((enough[0], _effect(enough[1], pins)))
    if closest.recompute and set(closest.recompute) == set(problem.profile.block_names):
        tried.useless.append("more recomputation (already all blocks)")
    if closest.microbatch_size == 1:
        tried.useless.append("smaller microbatches (already 1)")
    return tuple(tried.helpful), tuple(dict.fromkeys(tried.useless))


def _without_pins(tried: _Changes, problem: Problem, pins: Pins) -> None:
    """Try without each pin alone; offload with each of what it may be."""
    for name in pins.names:
        if name == "offload":
            for spared in offered(replace(pins, offload=None), problem, tried.batch)[1:]:
                other = replace(pins, offload=spared)
                tried.attempt(f"offload={offload_text(spared)}", problem, other)
        elif name not in _NO_BYTES:
            tried.attempt(f"{name} not pinned", problem, replace(pins, **{name: None}))


def _wider_clusters(tried: _Changes, asked: Problem, problem: Problem, free: Pins) -> None:
    """Try with more devices, until a plan fits. free: the pins without those of mesh axes."""
    for factor in (2, 4, 8, 16, 32, 64):
        if asked.cluster.count * factor > MOST_DEVICES:
            break
        wider, change = wider_cluster(asked.cluster, factor)
        wider = as_corrected(wider, asked.cluster, problem.cluster)
        if tried.attempt(change, replace(problem, cluster=wider), free):
            break


def _host_excess(plan: Plan, cluster: Cluster) -> int:
    assert plan.prediction is not None
    return host_excess(plan.prediction.memory, cluster)


def _effect(plan: Plan, wanted: Pins) -> str:
    """Peak and seconds of a plan that fits, and what it offloads without a pin."""
    effect = f"peak {format_bytes(fullest(plan).peak)}, {time_text(seconds(plan))}"
    if plan.offload and wanted.offload is None:
        effect += f", {offload_text(plan.offload)} on the host"
    return effect


def _enough(
    problem: Problem,
    pins: Pins,
    closest: Plan,
    batch: int,
    solve_all: SolveAll,
    refine: Refine | None,
) -> tuple[str, Plan] | None:
    """(the change in words, the plan) with devices, or hosts, whose memory is as large as a plan
    needs that was solved for them and built: the closest plan by the estimate may turn out larger.
    """
    plan, cluster = closest, problem.cluster
    for _ in range(_ROUNDS):
        cluster = _roomier(cluster, plan)
        try:
            outcome = solve_all(replace(problem, cluster=cluster), pins, batch)
            result = outcome.fitting[0] if outcome.fitting else outcome.closest
            plan = refine(result) if refine is not None and result is not None else result or plan
        except GraphAccelError:  # it can not run, or no longer be planned
            return None
        if excess(plan, cluster) <= 0:
            change = f"devices of {format_bytes(cluster.device.memory)}"
            if cluster.device.memory == problem.cluster.device.memory:
                change = f"hosts of {format_bytes(hosts(cluster))} for each device"
            elif hosts(cluster) != hosts(problem.cluster):
                change += f" and hosts of {format_bytes(hosts(cluster))} for each"
            return change, plan
    return None


def _roomier(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster with memory increased by what `plan` is short of, rounded to figures that can be
    typed."""
    top = fullest(plan).peak
    if top > cluster.device.memory:
        device = replace(cluster.device, memory=rounded_up(top))
        cluster = replace(cluster, device=device)
    over = _host_excess(plan, cluster)
    if over > 0:
        assert cluster.host is not None
        host = replace(cluster.host, memory=rounded_up(cluster.host.memory + over))
        cluster = replace(cluster, host=host)
    return cluster


def rounded_up(count: int) -> int:
    """The least number of bytes, at least `count`, that `format_bytes` writes exactly."""
    unit = next((size for size in (2**30, 2**20, 2**10) if count >= size / 10), 1)
    return -(-count * 10 // unit) * unit // 10


def wider_cluster(cluster: Cluster, factor: int) -> tuple[Cluster, str]:
    """The cluster with `factor` times as many devices, and the change in words.

    What `cluster` has from the catalogue is used for the larger one too: nodes are linked as in the
    catalogue, and processes on a host share it. Links that the catalogue does not have are assumed
    to reach all devices, and the text says so.
    """
    count = cluster.count * factor
    said = f"{count} devices"
    if cluster.device.name in device_names():
        here, there = (named_cluster(cluster.device.name, n) for n in (cluster.count, count))
        memory = cluster.device.memory
        memory = there.device.memory if memory == here.device.memory else memory
        like = replace(cluster.device, memory=here.device.memory) == here.device
        device = replace(there.device if like else cluster.device, memory=memory)
        host = there.host if cluster.host == here.host else cluster.host
        cluster = replace(cluster, device=device, host=host)
        if cluster.links == here.links:
            return replace(cluster, count=count, links=there.links), said
    *inner, last = cluster.links
    if last.size >= count:
        return replace(cluster, count=count), said
    wider = replace(cluster, count=count, links=(*inner, replace(last, size=count)))
    return wider, f"{said}, if {last.name} reaches them all"


def as_corrected(cluster: Cluster, asked: Cluster, corrected: Cluster) -> Cluster:
    """`cluster` with its device memory reduced in the ratio of `corrected` to `asked`
    (`solve.scaled`)."""
    context, size = cluster.context_bytes, cluster.device.memory
    usable = asked.device.memory - asked.context_bytes
    if usable <= 0 or corrected.device.memory == asked.device.memory:
        return cluster
    part = (corrected.device.memory - corrected.context_bytes) / usable
    device = replace(cluster.device, memory=int(context + (size - context) * part))
    return replace(cluster, device=device)
