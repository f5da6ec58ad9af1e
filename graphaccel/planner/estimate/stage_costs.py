"""Per-stage costs of a plan: seconds per phase, parameter bytes, microbatches in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import collective_costs_of
from graphaccel.planner.profile.candidate_cuts import stage_positions
from graphaccel.planner.profile.efficiency import computing
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.step_columns import Parameter

# Starting a stage's graph for one microbatch costs as much host time as starting some ops.
_LAUNCHES_AN_ACTION = 10
_GROUPS = 5
_NUMBERED = 1 << 62  # range of one integer


def sized_for(profile: Profile, plan: Plan, cluster: Cluster) -> SizedProfile:
    """The profile at the plan's microbatch size, on the plan's mesh."""
    collective_costs = collective_costs_of(cluster, plan) if plan.model_parallel_size > 1 else None
    device = computing(cluster.device, plan.precision)
    return profile.sized(plan.microbatch_size, device, collective_costs, plan.loss_chunk)


@dataclass(frozen=True)
class StageCost:
    """One stage of a plan: positions [first, end), seconds a microbatch, bytes of its parameters.

    weight: seconds of the backward that a schedule can run separately. action: seconds to start one
    action. sent_forward, sent_backward: seconds of collectives inside forward and backward. held:
    bytes of parameters and buffers. gradient: bytes of gradients; partial: of those among them that
    are partial sums, by the axes besides data. tensors: number of trained tensors.
    """

    first: int
    end: int
    forward: float
    backward: float
    held: int
    gradient: int
    tensors: int
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    partial: tuple[tuple[tuple[str, ...], int], ...] = ()
    weight: float = 0.0
    action: float = 0.0

    @property
    def summed(self) -> dict[tuple[str, ...], int]:
        """Bytes of gradients by the axes besides data over which they are still to be reduced."""
        results = dict(self.partial)
        return {(): self.gradient - sum(results.values()), **results}

    def shorter(self, factor: float) -> StageCost:
        """The stage with all seconds divided by `factor`."""
        names = ("forward", "backward", "weight", "action", "sent_forward", "sent_backward")
        return replace(self, **{name: getattr(self, name) / factor for name in names})

    @property
    def alone(self) -> StageCost:
        """The stage with collectives that take no time."""
        return replace(
            self,
            forward=self.forward - self.sent_forward,
            backward=self.backward - self.sent_backward,
            sent_forward=0.0,
            sent_backward=0.0,
        )


def stage_costs(
    profile: Profile, sized: SizedProfile, plan: Plan, launch_seconds: float
) -> tuple[StageCost, ...]:
    """The costs of each stage of `plan`. Raises ValueError for cuts that do not fit the graph."""
    spared = plan.holds_casts, recorded(plan), *spared_casts(plan)
    request = plan.cuts, plan.recompute, plan.selective, launch_seconds, spared
    return sized.analyses.cached(request, _stage_costs, profile, sized, plan, launch_seconds)


def recorded(plan: Plan) -> bool:
    """Whether each action is a CUDA graph, so that the process starts it as one operation. It is
    not where calls in a stage dispatch rows to experts or copy to the host."""
    inside = plan.expert > 1 or "activations" in plan.offload
    return plan.cuda_graphs and not inside and plan.ort in ("off", "auto")


def spared_casts(plan: Plan) -> tuple[float, float]:
    """The share of the casts of parameters that a microbatch does not run, in forward and backward:
    where ZeRO 3 gathers in low precision, only a shard is cast; held casts run once a step."""
    if plan.holds_casts:
        return 1 - 1 / plan.microbatches, 1.0
    low = 1 - 1 / plan.shards if plan.gathers_low else 0.0
    return low, low


def _stage_costs(
    profile: Profile, sized: SizedProfile, plan: Plan, launch_seconds: float
) -> tuple[StageCost, ...]:
    recomputing, sent_recomputing, host_recomputing = sized.recompute_seconds(
        profile.recomputation(plan)
    )
    ahead_of, back_of = spared_casts(plan)
    casts = sized.held_casts if plan.holds_casts else sized.casts
    forward = sized.forward - ahead_of * casts
    backward = sized.backward - back_of * casts + recomputing
    sent = sized.sent_backward + sent_recomputing
    starts = sized.held_starts if plan.holds_casts else np.zeros(len(profile), dtype=float)
    starting = sized.host_forward - ahead_of * starts
    host = sized.host_backward - back_of * starts + host_recomputing
    if recorded(plan):
        starting, host = np.zeros_like(starting), np.zeros_like(host)
    action = _LAUNCHES_AN_ACTION * launch_seconds
    columns = np.stack([
        forward, sized.sent_forward, starting, backward, sent, host, sized.weight
    ])  # fmt: skip
    costs = []
    for first, end in stage_positions(profile, plan.cuts):
        held = held_parameters(profile, [(first, end)])
        trained = [p for p in held if p.trainable]
        partial: dict[tuple[str, ...], int] = defaultdict(int)
        for parameter in trained:
            if parameter.name in profile.partial:
                partial[profile.partial[parameter.name]] += parameter.bytes
        *busy, weight = columns[:, first:end].sum(axis=1).tolist()
        ahead, back = _phase(*busy[:3]), _phase(*busy[3:])
        costs.append(
            StageCost(
                first=first,
                end=end,
                forward=action + ahead[0],
                backward=action + back[0],
                held=sum(p.bytes for p in held),
                gradient=sum(p.bytes for p in trained),
                tensors=len(trained),
                sent_forward=ahead[1],
                sent_backward=back[1],
                partial=tuple(sorted(partial.items())),
                weight=weight,
                action=action,
            )
        )
    return tuple(costs)


def _phase(busy: float, waiting: float, starting: float) -> tuple[float, float]:
    """(seconds of a stage's phase, seconds that collectives add): device and process work in
    parallel, so the slower one decides."""
    whole = max(busy, starting)
    return whole, whole - max(busy - waiting, starting)


def held_parameters(profile: Profile, spans: Sequence[tuple[int, int]]) -> tuple[Parameter, ...]:
    """Parameters and buffers that positions [first, end) of `spans` read; unused ones are on stage
    0."""
    return tuple(map(profile.parameters.__getitem__, profile.read(spans)))


def flight(plan: Plan) -> dict[int, int]:
    """Stage → the most microbatches of which it has the forward and not the backward."""
    return dict(_flight(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches))


@cache
def _flight(schedule: str, ranks: int, per_rank: int, microbatches: int) -> Mapping[int, int]:
    """Computed without the table of actions, which may be long: with 1F1B stage s holds S - s, also
    where gradients of weights are apart (`planner.estimate.weight_inputs`), and ranks of several
    stages repeat a pattern (`_held_by_rank`)."""
    stages = ranks * per_rank
    if schedule in ("1f1b", "zero_bubble") or (schedule == "interleaved" and per_rank == 1):
        return {s: min(microbatches, stages - s) for s in range(stages)}
    if schedule == "gpipe":
        return dict.fromkeys(range(stages), microbatches)
    held = [h.max(axis=0) for h in _held_by_rank(ranks, per_rank, repeating(ranks, microbatches))]
    return {s: int(held[s % ranks][s // ranks]) for s in range(stages)}


def held_together(plan: Plan, bytes_of: Sequence[int] | np.ndarray) -> np.ndarray:
    """For each stage, its microbatches in flight at the moment when its rank holds the most bytes.
    bytes_of: bytes that a stage saves of one microbatch.

    The stages of a rank peak at different times.
    """
    if plan.interleave == 1:
        return _flight_column(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches)
    ranks = plan.pipeline
    sizes = np.asarray(bytes_of, dtype=np.int64).reshape(plan.interleave, ranks)
    moments = _held_by_rank(ranks, plan.interleave, repeating(ranks, plan.microbatches))
    results = [held[(held @ sizes[:, rank]).argmax()] for rank, held in enumerate(moments)]
    return np.stack(results, axis=1).reshape(-1)


@cache
def _flight_column(schedule: str, ranks: int, per_rank: int, microbatches: int) -> np.ndarray:
    held = _flight(schedule, ranks, per_rank, microbatches)
    return np.array([held[stage] for stage in range(ranks * per_rank)])


@cache
def least_flight(ranks: int, per_rank: int, microbatches: int) -> np.ndarray:
    """For each rank, bytes that it holds at least at some moment, for each byte that its stages
    together save of one microbatch, however these bytes are divided among its stages: what it holds
    on average over the moments when it holds the most microbatches."""
    if per_rank == 1:
        return np.minimum(microbatches, ranks - np.arange(ranks)).astype(float)
    results = []
    for held in _held_by_rank(ranks, per_rank, repeating(ranks, microbatches)):
        total = held.sum(axis=1)
        results.append(max(held[total == total.max()].mean(axis=0).min(), held.min(axis=1).max()))
    return np.array(results, dtype=float)


def repeating(ranks: int, microbatches: int) -> int:
    """The number of microbatches after which a rank's states repeat: microbatches pass in groups of
    `ranks`, and between warm-up and cool-down every group is identical to the one before it."""
    return min(microbatches, _GROUPS * ranks + microbatches % ranks)


@cache
def _held_by_rank(ranks: int, per_rank: int, microbatches: int) -> tuple[np.ndarray, ...]:
    """For each rank of the interleaved schedule, before each of its actions: the number of
    microbatches in flight of each of its stages (`schedule.table.interleaved`). Repeated states are
    left out."""
    start, chunk, offset = np.indices((-(-microbatches // ranks), per_rank, ranks)).reshape(3, -1)
    real = start * ranks + offset < microbatches
    ahead = np.eye(per_rank, dtype=np.int64)[chunk]
    back = -ahead[:, ::-1]
    results = []
    for rank in range(ranks):
        warm = min(2 * (ranks - 1 - rank) + (per_rank - 1) * ranks, len(chunk))
        steady = len(chunk) - warm
        mixed = np.empty((2 * steady, per_rank), dtype=np.int64)
        mixed[::2], mixed[1::2] = ahead[warm:], back[:steady]
        kept = np.empty(2 * steady, dtype=bool)
        kept[::2], kept[1::2] = real[warm:], real[:steady]
        change = np.concatenate([ahead[:warm], mixed, back[steady:]])
        change = change[np.concatenate([real[:warm], kept, real[steady:]])]
        held = np.cumsum(change, axis=0) - change
        most = tuple((held.max(axis=0) + 1).tolist())
        if prod(most) < _NUMBERED:
            number = np.ravel_multi_index(tuple(held.T), most)
            held = held[np.sort(np.unique(number, return_index=True)[1])]
        results.append(held)
    return tuple(results)
