"""Estimates the peak memory of each pipeline rank from the graph's profile, without any pass.

It follows the liveness of the joint graph, cut into stages; a stage in 1F1B holds values of as many
microbatches as the schedule keeps in flight. What ZeRO gathers and reduces is allocated and freed
at the positions that read it (`passes.parameters.gather_parameters`,
`passes.gradients.reduce_shards`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.activation_offload import offloaded_bytes
from graphaccel.planner.estimate.external_loss import output_bytes
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory, step_bytes
from graphaccel.planner.estimate.stage_costs import (
    StageCost,
    held_parameters,
    held_together,
    sized_for,
    stage_costs,
)
from graphaccel.planner.estimate.stage_peaks import Peaks, stage_peaks
from graphaccel.planner.estimate.weight_inputs import with_weight_inputs
from graphaccel.planner.estimate.zero_memory import bytes_in_flight_key
from graphaccel.planner.estimate.zero_shards import Kept, kept_bytes, kept_whole, share_bytes
from graphaccel.planner.memory.phases import STEP
from graphaccel.planner.plan.offload import placed_optimizer, placed_parameters
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.step_columns import Parameter

_TRAVELLING = 2  # messages held by a rank: one that it awaits, one sent and not yet freed


def predict_memory(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    optimizer_bytes: int,
    step_memory: OptimizerMemory = NOTHING,
) -> tuple[StageMemory, ...]:
    """Peak bytes of each pipeline rank, by category.

    optimizer_bytes: bytes of optimizer state for each 4-byte trained parameter (8 for AdamW, 0 for
    none). step_memory: temporary memory of its step.
    """
    sized = sized_for(profile, plan, cluster)
    costs = stage_costs(profile, sized, plan.with_recomputed({}), cluster.device.launch_seconds)
    return _Estimate(
        profile, sized, tuple(costs), plan, cluster, optimizer_bytes, step_memory
    ).ranks()


@dataclass(frozen=True)
class _Held:
    """Bytes that a rank holds: parameters and buffers, the trained parameters, buffers, and the
    largest trained parameter."""

    all: int
    trained: int
    buffers: int
    largest: int


@dataclass(frozen=True)
class _Peak:
    """Bytes where a rank's activations and temporary memory are largest, on stage `stage`.
    gradient: of one microbatch. offloaded: activations on the host."""

    stage: int
    activation: int
    temporary: int
    gradient: int
    offloaded: int


@dataclass(frozen=True)
class _Estimate:
    """One plan's estimate."""

    profile: Profile
    sized: SizedProfile
    costs: tuple[StageCost, ...]
    plan: Plan
    cluster: Cluster
    optimizer_bytes: int
    step_memory: OptimizerMemory

    def ranks(self) -> tuple[StageMemory, ...]:
        profile, sized, costs, plan = self.profile, self.sized, self.costs, self.plan
        mesh = plan.cuts, plan.pipeline
        held = sized.analyses.cached(mesh, _of_ranks, profile, costs, plan.pipeline)
        kinds = plan.holds_gathered, plan.gathers_low, plan.holds_casts, plan.shards
        once = sized.analyses.cached(
            (*mesh, *kinds), _held_for_all_microbatches, profile, sized, costs, plan
        )
        each = zip(held, once, self._peaks(), strict=True)
        return tuple(self._rank(rank, *own) for rank, own in enumerate(each))

    @property
    def _split(self) -> bool:
        """Whether a gradient is summed over several parts of the batch."""
        return self.plan.microbatches > 1 or self.plan.data > 1

    @cached_property
    def _batch(self) -> int:
        """Bytes of the whole batch and of what the script reads of its outputs."""
        plan = self.plan
        batch = self.sized.batch_bytes * plan.data * plan.microbatches
        return batch + output_bytes(self.profile.step, plan.batch)

    @cached_property
    def _stage_peaks(self) -> Peaks:
        plan = self.plan
        moved = bytes_in_flight_key(plan), plan.offload, plan.holds_casts
        request = plan.cuts, plan.recompute, plan.selective, self._split, moved
        given = self.profile, self.sized, self.costs, plan
        return self.sized.analyses.cached(request, stage_peaks, *given)

    def _peaks(self) -> list[_Peak]:
        """The peak of each rank."""
        plan, peaks = self.plan, self._stage_peaks
        request = plan.cuts, plan.recompute, plan.selective, plan.scatter_sends
        given = self.profile, self.sized, self.costs, plan
        sent = self.sized.analyses.cached(request, _sent, *given)
        each = peaks.kept + sent
        waiting = held_together(plan, each)
        waits = waiting * each
        grown = peaks.activation + (np.maximum(waiting, 1) - 1) * each  # that many, instead of one
        if plan.schedule == "zero_bubble":
            own = peaks.activation + peaks.temporary
            given = self.profile, self.sized, plan, self.costs
            grown = with_weight_inputs(*given, each, own) - peaks.temporary
        shape = (plan.interleave, plan.pipeline)  # stage s is on rank s % pipeline
        beyond = (grown + peaks.temporary - waits).reshape(shape)
        top = beyond.argmax(axis=0) * plan.pipeline + np.arange(plan.pipeline)  # computes
        activations = waits.reshape(shape).sum(axis=0) - waits[top] + grown[top] + self._batch
        before = np.append(0, sent[: plan.pipeline - 1])
        activations += _TRAVELLING * np.maximum(sent.reshape(shape).max(axis=0), before)
        gradients = peaks.gradient.reshape(shape).sum(axis=0)
        offloaded = np.zeros(plan.pipeline, dtype=np.int64)
        if "activations" in plan.offload:
            offloaded_each = offloaded_bytes(self.profile, self.sized, plan)
            bytes_of = [int(offloaded_each[work.first : work.end].sum()) for work in self.costs]
            offloaded = (waiting * bytes_of).reshape(shape).sum(axis=0)
        columns = (top, activations, peaks.temporary[top], gradients, offloaded)
        return [_Peak(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    def _rank(self, rank: int, held: _Held, once: int, top: _Peak) -> StageMemory:
        """The memory of one rank: at its peak in forward and backward, or in the optimizer's step
        where that needs more."""
        plan = self.plan
        kept = kept_bytes(self.profile, plan, _spans(self.costs[rank :: plan.pipeline]))
        shard = held.trained
        if plan.zero:
            shard = share_bytes(held.trained, kept.trained, kept.padding_trained, plan)
        optimizer, host = placed_optimizer(shard * self.optimizer_bytes // 4, shard, plan.offload)
        held_bytes, below = self._parameters(held, kept, shard)
        host += top.offloaded + below
        gradient = self._gradient(held, kept, top)
        parameter, activation, temporary = held_bytes + once, top.activation, top.temporary
        at = self._stage_peaks.at(self.profile, top.stage)
        tensors = parameter + gradient + optimizer + activation + temporary
        last = shard if plan.zero >= 2 else held.trained
        step = self._step(held, kept, shard)
        if held_bytes + last + optimizer + self._batch + step > tensors:
            parameter, gradient, activation = held_bytes, last, self._batch
            temporary, at = step, STEP
            tensors = parameter + gradient + optimizer + activation + temporary
        other = self.cluster.context_bytes + int(self.cluster.fragmentation * tensors)
        return StageMemory(
            rank, parameter, gradient, optimizer, activation, temporary, other, tensors + other, at,
            host,
        )  # fmt: skip

    def _gradient(self, held: _Held, kept: Kept, top: _Peak) -> int:
        plan = self.plan
        gradient = held.trained if self._split else top.gradient
        if plan.zero >= 2 and plan.microbatches == 1:
            return top.gradient
        if plan.zero >= 2 and plan.accumulation == "shards":
            return share_bytes(gradient, kept.trained, kept.padding_trained, plan)
        return gradient

    def _parameters(self, held: _Held, kept: Kept, shard: int) -> tuple[int, int]:
        """Bytes of parameters and buffers between their uses: on the device, and on the host."""
        plan, parameter = self.plan, held.all
        if plan.zero == 3:
            parameter = share_bytes(parameter, kept.held + held.buffers, kept.padding, plan)
        if "parameters" not in plan.offload:
            return parameter, 0
        parameter, host = placed_parameters(parameter - held.buffers, shard, plan.offload)
        return parameter + held.buffers, host  # buffers stay on the device

    def _step(self, held: _Held, kept: Kept, shard: int) -> int:
        """Bytes that the optimizer's step allocates."""
        plan = self.plan
        share = plan.shards if plan.zero else 1
        shared = held.trained - kept.trained
        gathered = min(shared, 2 * max(plan.bucket_bytes, held.largest)) if share > 1 else 0
        apart = [gathered] if plan.zero < 3 else []
        sizes, fused = [held.largest // share] * 2, bool(plan.fusions)
        padded = kept.padded_trained // share if plan.zero < 3 else 0
        return step_bytes(plan, self.step_memory, shard, sizes, apart, fused, padded)


def in_parts(profile: Profile, sized: SizedProfile, plan: Plan) -> np.ndarray:
    """Which of the values that may cross a cut are sent in parts
    (`passes.stages.scatter_sends`)."""
    storage = profile.crossing.storage
    if not plan.scatter_sends:
        return np.zeros(len(storage), dtype=bool)
    even = sized.bytes[storage] % (plan.tensor * profile.storages.item_bytes[storage]) == 0
    return profile.storages.replicated[storage] & even


def _sent(
    profile: Profile, sized: SizedProfile, costs: Sequence[StageCost], plan: Plan
) -> np.ndarray:
    """Bytes of one microbatch that each stage sends on, without what its own backward needs: they
    are held until that microbatch's gradient comes back (`schedule.walk`). Parts are copies."""
    ends = np.array([work.end - 1 for work in costs])
    crossing = profile.crossing
    source = np.searchsorted(ends, crossing.at)
    kept, kept_at, *_ = profile.saved(profile.recomputation(plan))
    wanted = np.full(len(profile.storages), -1)
    wanted[kept] = np.searchsorted(ends, kept_at)
    far = np.searchsorted(ends, crossing.last) != source
    parts = in_parts(profile, sized, plan)
    far &= (wanted[crossing.storage] != source) | parts
    size = sized.bytes[crossing.storage] // np.where(parts, plan.tensor, 1)
    return np.bincount(source[far], size[far], minlength=len(costs)).astype(np.int64)


def _of_ranks(profile: Profile, costs: Sequence[StageCost], ranks: int) -> tuple[_Held, ...]:
    """What each rank holds."""
    results = []
    for rank in range(ranks):
        held = held_parameters(profile, _spans(costs[rank::ranks]))
        trained = sum(p.bytes for p in held if p.trainable)
        buffers = sum(p.bytes for p in held if p.name not in profile.parameter_names)
        largest = max((p.bytes for p in held if p.trainable), default=0)
        results.append(_Held(sum(p.bytes for p in held), trained, buffers, largest))
    return tuple(results)


def _spans(costs: Sequence[StageCost]) -> tuple[tuple[int, int], ...]:
    return tuple((work.first, work.end) for work in costs)


def _held_for_all_microbatches(
    profile: Profile, sized: SizedProfile, costs: Sequence[StageCost], plan: Plan
) -> list[int]:
    """Bytes that each rank holds of its stages' parameters for all microbatches: parameters that
    ZeRO 3 gathered, or one cast of each, however often it is read."""
    ranks = range(plan.pipeline)
    return [_held_by_one(profile, sized, costs[r :: plan.pipeline], plan) for r in ranks]


def _held_by_one(
    profile: Profile, sized: SizedProfile, costs: Sequence[StageCost], plan: Plan
) -> int:
    if plan.holds_casts:
        storage, parameter, place = profile.held_casts
        size = sized.bytes[storage]
        total = 0
        for work in costs:
            here = (work.first <= place) & (place < work.end)
            _, at = np.unique(parameter[here], return_index=True)
            total += int(size[here][at].sum())
        return total
    if not plan.holds_gathered:
        return 0
    total = sum(
        p.bytes
        for work in costs
        for p in held_parameters(profile, [(work.first, work.end)])
        if p.name in profile.parameter_names and p.name not in kept_whole(profile, plan)
    )
    return total // 2 if plan.gathers_low else total


def gathered_sizes(profile: Profile, held: Sequence[Parameter], plan: Plan) -> list[int]:
    """Bytes of each group that ZeRO 3 gathers at once: the parameters that one block reads, and
    outside blocks each parameter, in the dtype in which they are gathered."""
    groups: dict[str, int] = defaultdict(int)
    kept = kept_whole(profile, plan)
    for parameter in held:
        if parameter.name in kept:
            continue
        blocks = {int(profile.block_at[p]) for p in parameter.positions}
        one = blocks.pop() if len(blocks) == 1 else -1
        groups[profile.block_names[one] if one >= 0 else parameter.name] += parameter.bytes
    return [size // 2 if plan.gathers_low else size for size in groups.values()]
