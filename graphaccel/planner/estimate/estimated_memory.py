"""Estimates the peak memory of each pipeline rank from the graph's profile, without any pass.

It follows the liveness of the joint graph, cut into stages; a stage in 1F1B holds values of as many
microbatches as the schedule keeps in flight. What ZeRO gathers and reduces is allocated and freed
at the positions that read it (`passes.gather_parameters`, `passes.reduce_shards`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.activation_offload import away_bytes
from graphaccel.planner.estimate.external_loss import output_bytes
from graphaccel.planner.estimate.optimizer_memory import NOTHING, Stepping, step_bytes
from graphaccel.planner.estimate.stage_costs import (
    StageWork,
    held_parameters,
    held_together,
    sized_for,
    stage_works,
)
from graphaccel.planner.estimate.stage_peaks import stage_peaks
from graphaccel.planner.estimate.zero_memory import motion_key
from graphaccel.planner.estimate.zero_shards import kept_bytes, kept_whole, share_bytes
from graphaccel.planner.memory.phases import STEP
from graphaccel.planner.plan.offload import placed_optimizer, placed_parameters
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.planner.profile.profile import Parameter, Profile, SizedProfile

_TRAVELLING = 2  # messages held by a rank: one that it awaits, one sent and not yet freed


def predict_memory(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    optimizer_bytes: int,
    stepping: Stepping = NOTHING,
) -> tuple[StageMemory, ...]:
    """Peak bytes of each pipeline rank, by category.

    optimizer_bytes: bytes of optimizer state for each 4-byte trained parameter (8 for AdamW, 0 for
    none). stepping: temporary memory of its step.
    """
    sized = sized_for(profile, plan, cluster)
    works = stage_works(profile, sized, plan.doing_again({}), cluster.device.launch_seconds)
    split = plan.microbatches > 1 or plan.data > 1
    whole_batch = sized.batch_bytes * plan.data * plan.microbatches
    whole_batch += output_bytes(profile.step, plan.batch)
    owned = sized.once(
        ("ranks", plan.cuts, plan.pipeline), lambda: _of_ranks(profile, works, plan.pipeline)
    )
    once = sized.once(
        ("held", plan.cuts, plan.pipeline, plan.holds_gathered, plan.gathers_low, plan.holds_casts,
         plan.shards),
        lambda: [_made_once(profile, sized, works[r :: plan.pipeline], plan)
                 for r in range(plan.pipeline)],
    )  # fmt: skip
    moved = motion_key(plan), plan.offload, plan.holds_casts
    key = ("peaks", plan.cuts, plan.recompute, plan.selective, split, moved)
    peaks = sized.once(key, lambda: stage_peaks(profile, sized, works, plan))
    sent = sized.once(
        ("sent", plan.cuts, plan.recompute, plan.selective, plan.scatter_sends),
        lambda: _sent(profile, sized, works, plan),
    )
    each = peaks.kept + sent
    waiting = held_together(plan, each)
    waits = waiting * each
    grown = peaks.activation + (np.maximum(waiting, 1) - 1) * each  # that many, instead of one
    lying = (plan.interleave, plan.pipeline)  # [interleave, rank]: stage s is on rank s % pipeline
    beyond = (grown + peaks.temporary - waits).reshape(lying)
    top = beyond.argmax(axis=0) * plan.pipeline + np.arange(plan.pipeline)  # computes
    activations = waits.reshape(lying).sum(axis=0) - waits[top] + grown[top] + whole_batch
    before = np.append(0, sent[: plan.pipeline - 1])
    activations += _TRAVELLING * np.maximum(sent.reshape(lying).max(axis=0), before)
    gradients = peaks.gradient.reshape(lying).sum(axis=0)
    gone = np.zeros(plan.pipeline, dtype=np.int64)
    if "activations" in plan.offload:
        lying_away = away_bytes(profile, sized, plan)
        bytes_of = [int(lying_away[work.first : work.end].sum()) for work in works]
        gone = (waiting * bytes_of).reshape(lying).sum(axis=0)
    ranks = []
    columns = (top, activations, peaks.temporary[top], gradients, gone)
    rows = zip(owned, *(column.tolist() for column in columns), strict=True)
    for rank, (of_rank, stage, activation, temporary, made, away) in enumerate(rows):
        parameter, trained, buffers, largest = of_rank
        gradient = trained if split else made
        kept = kept_bytes(profile, plan, _spans(works[rank :: plan.pipeline]))
        shard = (
            share_bytes(trained, kept.trained, kept.padding_trained, plan) if plan.zero else trained
        )
        optimizer, host = placed_optimizer(shard * optimizer_bytes // 4, shard, plan.offload)
        host += away
        if plan.zero >= 2 and plan.microbatches == 1:
            gradient = made
        elif plan.zero >= 2 and plan.accumulation == "shards":
            gradient = share_bytes(gradient, kept.trained, kept.padding_trained, plan)
        if plan.zero == 3:
            parameter = share_bytes(parameter, kept.held + buffers, kept.padding, plan)
        if "parameters" in plan.offload:  # buffers stay on the device
            resting = parameter - buffers
            parameter, below = placed_parameters(resting, shard, plan.offload)
            parameter, host = parameter + buffers, host + below
        resting = parameter
        parameter += once[rank]
        tensors = parameter + gradient + optimizer + activation + temporary
        at = peaks.at(profile, stage)
        share = plan.shards if plan.zero else 1
        shared = trained - kept.trained
        gathered = min(shared, 2 * max(plan.bucket_bytes, largest)) if share > 1 else 0
        apart = [gathered] if plan.zero < 3 else []
        sizes, fused = [largest // share] * 2, bool(plan.fusions)
        padded = kept.padded_trained // share if plan.zero < 3 else 0
        made = step_bytes(plan, stepping, shard, sizes, apart, fused, padded)
        last = shard if plan.zero >= 2 else trained
        if resting + last + optimizer + whole_batch + made > tensors:
            parameter, gradient, activation = resting, last, whole_batch
            temporary, at = made, STEP
            tensors = parameter + gradient + optimizer + activation + temporary
        other = cluster.context_bytes + int(cluster.fragmentation * tensors)
        ranks.append(
            StageMemory(
                rank, parameter, gradient, optimizer, activation, temporary, other,
                tensors + other, at, host,
            )
        )  # fmt: skip
    return tuple(ranks)


def in_parts(profile: Profile, sized: SizedProfile, plan: Plan) -> np.ndarray:
    """Which of the values that may cross a cut are sent in parts (`passes.scatter_sends`)."""
    storage = profile.crossing.storage
    if not plan.scatter_sends:
        return np.zeros(len(storage), dtype=bool)
    even = sized.bytes[storage] % (plan.tensor * profile.storages.item_bytes[storage]) == 0
    return profile.storages.replicated[storage] & even


def _sent(
    profile: Profile, sized: SizedProfile, works: Sequence[StageWork], plan: Plan
) -> np.ndarray:
    """Bytes of one microbatch that each stage sends on, without what its own backward needs: they
    are held until that microbatch's gradient comes back (`schedule.walk`). Parts are copies."""
    ends = np.array([work.end - 1 for work in works])
    crossing = profile.crossing
    source = np.searchsorted(ends, crossing.at)
    kept, kept_at, *_ = profile.saved(profile.again(plan))
    wanted = np.full(len(profile.storages), -1)
    wanted[kept] = np.searchsorted(ends, kept_at)
    far = np.searchsorted(ends, crossing.last) != source
    parts = in_parts(profile, sized, plan)
    far &= (wanted[crossing.storage] != source) | parts
    size = sized.bytes[crossing.storage] // np.where(parts, plan.tensor, 1)
    return np.bincount(source[far], size[far], minlength=len(works)).astype(np.int64)


def _of_ranks(
    profile: Profile, works: Sequence[StageWork], ranks: int
) -> tuple[tuple[int, int, int, int], ...]:
    """For each rank, bytes of parameters and buffers, of the trained parameters, of buffers, and of
    the largest trained parameter."""
    found = []
    for rank in range(ranks):
        held = held_parameters(profile, _spans(works[rank::ranks]))
        trained = sum(p.bytes for p in held if p.trainable)
        buffers = sum(p.bytes for p in held if p.name not in profile.resting)
        largest = max((p.bytes for p in held if p.trainable), default=0)
        found.append((sum(p.bytes for p in held), trained, buffers, largest))
    return tuple(found)


def _spans(works: Sequence[StageWork]) -> tuple[tuple[int, int], ...]:
    return tuple((work.first, work.end) for work in works)


def _made_once(
    profile: Profile, sized: SizedProfile, works: Sequence[StageWork], plan: Plan
) -> int:
    """Bytes that a rank holds of its stages' parameters for all microbatches: parameters that ZeRO
    3 gathered, or one cast of each, however often it is read."""
    if plan.holds_casts:
        storage, parameter, place = profile.held_casts
        size = sized.bytes[storage]
        found = 0
        for work in works:
            here = (work.first <= place) & (place < work.end)
            _, at = np.unique(parameter[here], return_index=True)
            found += int(size[here][at].sum())
        return found
    if not plan.holds_gathered:
        return 0
    found = sum(
        p.bytes
        for work in works
        for p in held_parameters(profile, [(work.first, work.end)])
        if p.name in profile.resting and p.name not in kept_whole(profile, plan)
    )
    return found // 2 if plan.gathers_low else found


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
