"""Solves one candidate: chooses its stage cuts and recomputed blocks so that it fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from graphaccel.errors import BadPin, TooManyStages
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.estimate import predict, predict_seconds
from graphaccel.planner.estimate.estimated_memory import predict_memory
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory
from graphaccel.planner.estimate.stage_costs import flight, sized_for
from graphaccel.planner.estimate.stage_messages import gathered_bytes, scatters
from graphaccel.planner.plan.axis_orders import orders
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.offload import device_state, host_excess, placed_parameters
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Prediction, StageMemory
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.stages import StageLimit, choose_cuts
from graphaccel.planner.search.minimal_recompute import needed
from graphaccel.planner.search.recompute import BlockOption, block_options, every_second


@dataclass(frozen=True)
class Problem:
    """The problem to plan. layouts: profiles, of the unsharded graph and of its shards.
    optimizer_bytes: bytes of optimizer state for each trained number. shardable: the optimizer can
    work on shards. stages: pinned stages of modules. step_memory: memory that the optimizer's step
    needs besides its state."""

    layouts: Layouts
    cluster: Cluster
    optimizer_bytes: int
    limits: Limits
    shardable: bool = True
    stages: tuple[tuple[str, int], ...] = ()
    step_memory: OptimizerMemory = NOTHING

    @property
    def profile(self) -> Profile:
        """The profile of the unsharded graph."""
        return self.layouts.whole

    def sized(self, plan: Plan) -> SizedProfile:
        """The plan's profile at its microbatch size and precision."""
        return sized_for(self.layouts.of(plan), plan, self.cluster)

    def fits(self, plan: Plan) -> bool:
        """Whether `plan` is predicted to fit, without predicting its seconds."""
        return excess_of(self.memory(plan), self.cluster) <= 0

    def memory(self, plan: Plan) -> tuple[StageMemory, ...]:
        """The predicted memory of each rank of `plan`."""
        given = self.cluster, self.optimizer_bytes, self.step_memory
        return predict_memory(self.layouts.of(plan), plan, *given)

    def time(self, plan: Plan) -> Prediction:
        """The predicted seconds of `plan`, by simulation of its schedule, without its memory."""
        return predict_seconds(self.layouts.of(plan), plan, self.cluster, self.optimizer_bytes)

    def predicted(self, plan: Plan, *, simulated: bool) -> Plan:
        """`plan` with its prediction."""
        profile = self.layouts.of(plan)
        given = self.cluster, self.optimizer_bytes, self.step_memory
        return predict(profile, plan, *given, simulated=simulated)


def excess(plan: Plan, cluster: Cluster) -> int:
    """Bytes by which a predicted plan exceeds the device memory on its fullest rank, or the host
    memory with what it offloads; below 0 it fits."""
    assert plan.prediction is not None
    return excess_of(plan.prediction.memory, cluster)


def excess_of(memory: Sequence[StageMemory], cluster: Cluster) -> int:
    """`excess` of the memory of a plan's ranks."""
    missing = max(m.peak for m in memory) - cluster.device.memory
    kept = host_excess(memory, cluster)
    return max(missing, kept) if kept > 0 else missing


@dataclass
class Tally:
    """The counts of candidates for the certificate: pruned, solved or impossible each; infeasible
    counts those solved that do not fit, or are too big before anything is computed."""

    candidates: int = 0
    infeasible: int = 0
    pruned: int = 0
    solved: int = 0
    impossible: int = 0

    def certificate(self, gap: str) -> str:
        """The certificate in one line."""
        parts = [
            f"{self.candidates} candidates: {self.solved} solved ({self.infeasible} do not fit)",
            f"{self.pruned} pruned by bound",
        ]
        if self.impossible:
            parts.append(f"{self.impossible} can not be cut")
        return ", ".join(parts) + f"; {gap}"


@dataclass
class Shared:
    """Caches shared by searches that differ in what is offloaded: what the bounds know
    (`planner.search.bounds`), and candidates, by whether activations are offloaded."""

    bounds: dict[Any, Any] = field(default_factory=dict)
    candidates: dict[bool, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """Solved candidates. fitting: fastest first; by_mesh: the best of each mesh; closest: the one
    that is short of the fewest bytes; seen: all of them, in the order in which they were solved;
    played: times of schedules that were simulated; too_many, refused: why a candidate could not be
    cut. kept: how many of the fitting were ranked by simulation. whole: every cut and set of blocks
    was tried (`planner.search.exhaustive`). open: the number of candidates that might be faster and
    were not solved, and seconds that they can not beat; None where there are none. cramped: least
    seconds of what memory alone rules out, or a bound of them. larger: kinds of plans
    (`reasons.kind_of`) of which some turned out larger than estimated. shared: caches shared with
    other searches for the same plan. rest: solves what is open below so many seconds, or the share
    of a better plan's seconds below that."""

    fitting: list[Plan] = field(default_factory=list)
    seen: list[Plan] = field(default_factory=list)
    by_mesh: dict[tuple[int, ...], Plan] = field(default_factory=dict)
    played: dict[Plan, Prediction] = field(default_factory=dict)
    closest: Plan | None = None
    tally: Tally = field(default_factory=Tally)
    too_many: TooManyStages | None = None
    refused: BadPin | None = None
    kept: int = 0
    whole: bool = False
    open: tuple[int, float] | None = None
    cramped: float = math.inf
    larger: set[tuple[int, ...]] = field(default_factory=set)
    shared: Shared = field(default_factory=Shared)
    rest: Callable[[float, float], None] | None = None

    def beside(self, other: Outcome, cluster: Cluster) -> None:
        """Add the candidates of another search for the same plan."""
        pairs = zip(astuple(self.tally), astuple(other.tally), strict=True)
        self.tally = Tally(*(own + more for own, more in pairs))
        self.seen += other.seen
        self.whole = self.whole and other.whole
        self.played.update(other.played)
        if other.open is not None:
            many, bound = self.open or (0, math.inf)
            self.open = many + other.open[0], min(bound, other.open[1])
        for key, plan in other.by_mesh.items():
            known = self.by_mesh.get(key)
            if known is None or _order(cluster, plan) < _order(cluster, known):
                self.by_mesh[key] = plan

    def missed(self, plan: Plan, cluster: Cluster) -> None:
        """Record a plan that does not fit."""
        if self.closest is None or excess(plan, cluster) < excess(self.closest, cluster):
            self.closest = plan


def with_cuts_and_blocks(
    problem: Problem, plan: Plan, recompute: str | Sequence[str], cuts: tuple[str, ...] | None
) -> Plan:
    """`plan` with cuts, recomputed blocks and its prediction (time in closed form).

    recompute: "none", "all", "some" (as much as memory requires; every second block if it requires
    none), "selective" (every block, except for values that it saves, as memory requires) or names.
    Cuts are even in time; where that does not fit however much is recomputed, they are chosen again
    under each stage's memory. Where a fused op processes its rows in chunks, smaller chunks are
    tried where that makes a plan fit, or fit with less recomputation.

    Raises: TooManyStages (GA203), BadPin (GA202) where the pinned stages of modules are not
    possible, or loss_chunk is pinned and no op processes rows in chunks.
    """
    first, *smaller = chunked(problem, plan)
    best = _solved(problem, first, recompute, cuts)
    all_sizes = recompute in ("some", "selective")
    if not smaller or (not all_sizes and excess(best, problem.cluster) <= 0):
        return best  # smaller chunks take longer
    least = _solved(problem, smaller[-1], recompute, cuts)
    if excess(least, problem.cluster) > 0:  # larger chunks take more memory
        return min(best, least, key=lambda one: _order(problem.cluster, one))
    for tried in smaller[:-1]:
        result = _solved(problem, tried, recompute, cuts)
        best = min(best, result, key=lambda one: _order(problem.cluster, one))
        if excess(best, problem.cluster) <= 0 and not all_sizes:
            return best
    return min(best, least, key=lambda one: _order(problem.cluster, one))


def in_orders(
    problem: Problem, plan: Plan, recompute: str | Sequence[str], cuts: tuple[str, ...] | None
) -> list[Plan]:
    """`with_cuts_and_blocks` in each candidate order of the axes.

    The order changes neither memory nor seconds of compute: cuts and blocks are those of the first
    order, unless messages between stages are scattered in one of the orders only.
    """
    first = with_cuts_and_blocks(problem, plan, recompute, cuts)
    assert first.prediction is not None
    results = [first]
    for order in orders(problem.cluster, plan)[1:]:
        moved = replace(plan, order=order)
        ways = (scatters(one, problem.cluster) for one in (plan, moved))
        if "scatter_sends" not in plan.pinned and len(set(ways)) > 1:
            results.append(with_cuts_and_blocks(problem, moved, recompute, cuts))
            continue
        other = replace(first, order=order)
        given = problem.layouts.of(other), other, problem.cluster, problem.optimizer_bytes
        prediction = predict_seconds(*given, simulated=False)
        results.append(
            replace(other, prediction=replace(prediction, memory=first.prediction.memory))
        )
    return results


def _order(cluster: Cluster, plan: Plan) -> tuple[int, float]:
    """Sort key of plans: one that fits, or is short of fewer bytes, is better; then time."""
    assert plan.prediction is not None
    return max(0, excess(plan, cluster)), plan.prediction.seconds


def chunked(problem: Problem, plan: Plan) -> list[Plan]:
    """The plan with each candidate chunk size; unchanged where that is pinned, or no op processes
    rows in chunks. Raises BadPin (GA202) if it is pinned and no op does."""
    if "loss_chunk" in plan.pinned and not problem.layouts.of(plan).in_chunks:
        reason = f"with tensor={plan.tensor} the graph has no fused head and loss"
        raise BadPin(pin="loss_chunk", value=plan.loss_chunk, reason=reason)
    sizes = problem.sized(plan).chunks
    if not sizes or "loss_chunk" in plan.pinned:
        return [plan]
    return [replace(plan, loss_chunk=size) for size in sizes]


def _solved(
    problem: Problem, plan: Plan, recompute: str | Sequence[str], cuts: tuple[str, ...] | None
) -> Plan:
    choices = [cuts] if cuts is not None else cut_choices(problem, plan)
    best: Plan | None = None
    for choice in choices:
        solved = _with_blocks(problem, _sending(problem, replace(plan, cuts=choice)), recompute)
        solved = _casting(problem, solved)
        if excess(solved, problem.cluster) <= 0:
            return solved
        if best is None or excess(solved, problem.cluster) < excess(best, problem.cluster):
            best = solved
    assert best is not None
    return best


def _sending(problem: Problem, plan: Plan) -> Plan:
    """The plan with `scatter_sends` where that is faster and some values can be sent so, unless
    pinned."""
    if "scatter_sends" in plan.pinned or not scatters(plan, problem.cluster):
        return plan
    tried = replace(plan, scatter_sends=True)
    some = gathered_bytes(problem.layouts.of(tried), problem.sized(tried), tried)
    return tried if some else plan


def _casting(problem: Problem, plan: Plan) -> Plan:
    """The plan with casts of parameters held for all microbatches where that fits and is faster,
    unless pinned."""
    tried = replace(plan, cast_once=True)
    if "cast_once" in plan.pinned or plan.microbatches == 1 or not tried.holds_casts:
        return plan
    if not problem.profile.step.has_loss or excess(plan, problem.cluster) > 0:
        return plan
    tried = problem.predicted(tried, simulated=False)
    assert plan.prediction is not None
    assert tried.prediction is not None
    faster = tried.prediction.seconds < plan.prediction.seconds
    return tried if faster and excess(tried, problem.cluster) <= 0 else plan


def cut_choices(problem: Problem, plan: Plan) -> Iterator[tuple[str, ...]]:
    """The cuts that are even in time, then those that are even in time among what fits."""
    sized, cluster, stages = problem.sized(plan), problem.cluster, plan.stages
    link = cluster.links[0]
    seconds = 1 / link.bandwidth, link.latency_seconds + cluster.device.launch_seconds
    profile = problem.layouts.of(plan)
    pinned = problem.stages
    request = stages, *seconds, pinned
    even = sized.analyses.cached(
        request, choose_cuts, profile, sized, stages, *seconds, pinned=pinned
    )
    assert even is not None
    yield even
    if stages == 1:
        return
    waiting = flight(plan)
    limit = StageLimit(
        per_parameter_byte=float(
            sum(
                resident_parts(
                    plan.shards,
                    plan.zero,
                    plan.microbatches == 1 or plan.accumulation == "shards",
                    plan.holds_gathered,
                    problem.optimizer_bytes,
                    0.5 if plan.gathers_low else 1.0,
                    plan.offload,
                )
            )
        ),
        in_flight=tuple(waiting[s] for s in range(stages)),
        budget=(cluster.tensor_budget / plan.interleave,) * stages,
    )
    fitting = sized.analyses.cached(
        (*request, limit), choose_cuts, profile, sized, stages, *seconds,
        saved=sized.saved(profile.full_recomputation)[0], limit=limit, pinned=pinned,
    )  # fmt: skip
    if fitting not in (None, even):
        yield fitting


def resident_parts(
    shards: Any,
    zero: Any,
    once: Any,
    held: Any,
    optimizer_bytes: int,
    gathered: float,
    offload: Sequence[str],
) -> tuple[Any, Any, Any]:
    """Bytes that a device holds for each byte of trained parameter of its stage: parameter,
    gradient and optimizer state, without what ZeRO shards away and what is offloaded; of one plan,
    or of columns.

    shards: devices that ZeRO shards over. once: gradients are reduced as soon as they are computed.
    held: parameters are gathered once a step and held. gathered: bytes that each then takes."""
    share, (own, _) = 1 / shards, placed_parameters(1, 1, offload)
    parameter = own * np.where(zero == 3, share, 1.0) + np.where(held, gathered, 0.0)
    gradient = np.where(np.logical_and(np.greater_equal(zero, 2), once), share, 1.0)
    state = device_state(optimizer_bytes, offload)
    return parameter, gradient, state / 4 * np.where(np.equal(zero, 0), 1.0, share)


def _with_blocks(problem: Problem, plan: Plan, recompute: str | Sequence[str]) -> Plan:
    """The plan with its recomputed blocks and its prediction."""
    profile = problem.layouts.of(plan)
    names = profile.block_names
    given = profile, plan, problem.cluster, problem.optimizer_bytes, problem.step_memory
    if recompute == "none":
        chosen: Mapping[str, tuple[str, ...]] = {}
    elif recompute == "all":
        chosen = dict.fromkeys(names, ())
    elif recompute == "some":
        chosen = needed(*given, block_options(profile, problem.sized(plan)), 0)
        chosen = chosen or dict.fromkeys(every_second(names), ())
    elif recompute == "selective":
        chosen = needed(*given, _selective(problem, plan), 1)
    else:
        chosen = dict.fromkeys(recompute, ())
    result = problem.predicted(plan.with_recomputed(chosen), simulated=False)
    if recompute == "some" and excess(result, problem.cluster) > 0:  # recomputed values take memory
        less = _with_blocks(problem, plan, "selective")
        return min(result, less, key=lambda one: excess(one, problem.cluster))
    return result


def _selective(problem: Problem, plan: Plan) -> tuple[tuple[BlockOption, ...], ...]:
    """The options of each block in which it saves some values."""
    options = block_options(problem.layouts.of(plan), problem.sized(plan))
    return tuple(tuple(o for o in own if o.saved) for own in options)


def scaled(problem: Problem, plan: Plan, exact: Plan) -> Problem:
    """The problem with device memory reduced by the error of the estimate: exact over estimated
    tensor bytes, for an even choice of experts, as the estimate assumes."""
    assert plan.prediction is not None
    assert exact.prediction is not None
    ratio = max(
        (real.tensors - real.chosen) / guessed.tensors
        for real, guessed in zip(exact.prediction.memory, plan.prediction.memory, strict=True)
    )
    cluster = problem.cluster
    memory = cluster.context_bytes + (cluster.device.memory - cluster.context_bytes) / max(
        ratio, 1.01
    )
    device = replace(cluster.device, memory=int(memory))
    return replace(problem, cluster=replace(cluster, device=device))
