"""Memory of a plan, predicted from the profile of its graph without running any pass.

It follows the liveness of the joint graph, cut into stages; a stage in 1F1B waits for as many
microbatches as the schedule keeps in flight. What ZeRO gathers and reduces comes and goes with the
positions that read it (`passes.gather_parameters`, `passes.reduce_shards`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphaccel.planner.away import away_bytes, beside
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.motion import in_motion, motion_key
from graphaccel.planner.offload import placed_optimizer
from graphaccel.planner.outside import output_bytes
from graphaccel.planner.plan import Plan, StageMemory
from graphaccel.planner.profile import Parameter, Profile, SizedProfile
from graphaccel.planner.works import (
    StageWork,
    held_parameters,
    held_together,
    sized_for,
    stage_works,
)

_TRAVELLING = 2  # messages on their way to and from a rank: one is awaited, one not yet let go of


def predict_memory(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int
) -> tuple[StageMemory, ...]:
    """Peak bytes of each pipeline rank, by category.

    optimizer_bytes: bytes of optimizer state for each 4-byte trained parameter (8 for AdamW, 0 for
    none).
    """
    sized = sized_for(profile, plan, cluster)
    works = stage_works(profile, sized, replace(plan, recompute=()), cluster.device.launch_seconds)
    split = plan.microbatches > 1 or plan.data > 1
    whole_batch = sized.batch_bytes * plan.data * plan.microbatches
    whole_batch += output_bytes(profile.step, plan.batch)
    owned = sized.once(
        ("ranks", plan.cuts, plan.pipeline), lambda: _of_ranks(profile, works, plan.pipeline)
    )

    away = away_bytes(profile, sized, plan)

    def alone() -> list[tuple[_Peak, int]]:
        saved, again = sized.saved(profile.numbers(plan.recompute))
        saved = saved - away
        return [
            _stage_peak(profile, sized, work, saved, again, split or bool(work.partial), plan)
            for work in works
        ]

    key = ("peaks", plan.cuts, plan.recompute, split, motion_key(plan), plan.offload)
    ones = sized.once(key, alone)
    numbers = profile.numbers(plan.recompute)
    sent = sized.once(
        ("sent", plan.cuts, plan.recompute), lambda: _sent(profile, sized, works, numbers)
    )
    each = [kept + gone for (_, kept), gone in zip(ones, sent, strict=True)]
    waiting = held_together(plan, each)
    ranks = []
    for rank, (parameter, trained) in enumerate(owned):
        own = range(rank, plan.stages, plan.pipeline)
        peaks = {s: ones[s][0].waiting(max(waiting.get(s, 0), 1), each[s]) for s in own}
        waits = {s: waiting.get(s, 0) * each[s] for s in own}
        beyond = {s: peaks[s].activation + peaks[s].temporary - waits[s] for s in own}
        top = max(own, key=lambda s: (beyond[s], -s))  # computes; the others wait
        activation = sum(waits.values()) - waits[top] + peaks[top].activation + whole_batch
        activation += _TRAVELLING * max((sent[s] for s in (*own, rank - 1) if s >= 0), default=0)
        temporary = peaks[top].temporary
        gradient = trained if split else sum(peaks[s].gradient for s in own)
        shard = trained // (plan.data if plan.zero else 1)
        optimizer, host = placed_optimizer(shard * optimizer_bytes // 4, shard, plan.offload)
        gone = {s: int(away[works[s].first : works[s].end].sum()) for s in own}
        host += sum(waiting.get(s, 0) * size for s, size in gone.items())
        if plan.zero >= 2 and plan.microbatches == 1:
            gradient = sum(peaks[s].gradient for s in own)
        elif plan.zero >= 2 and plan.accumulation == "shards":
            gradient //= plan.data
        if plan.zero == 3:
            parameter //= plan.data
        tensors = parameter + gradient + optimizer + activation + temporary
        other = cluster.context_bytes + int(cluster.fragmentation * tensors)
        ranks.append(
            StageMemory(
                rank, parameter, gradient, optimizer, activation, temporary, other,
                tensors + other, peaks[top].at, host,
            )
        )  # fmt: skip
    return tuple(ranks)


def _sent(
    profile: Profile, sized: SizedProfile, works: Sequence[StageWork], recomputed: Sequence[int]
) -> list[int]:
    """Bytes of what each stage sends on of one microbatch, but for what its backward needs itself:
    it lies there until that microbatch's gradient comes back (`schedule.walk`)."""
    ends = np.array([work.end - 1 for work in works])
    crossing = profile.crossing
    source = np.searchsorted(ends, crossing.at)
    kept, kept_at, *_ = profile.saved(recomputed)
    wanted = np.full(len(profile.storages), -1)
    wanted[kept] = np.searchsorted(ends, kept_at)
    far = np.searchsorted(ends, crossing.last) != source
    far &= wanted[crossing.storage] != source
    size = sized.bytes[crossing.storage]
    return np.bincount(source[far], size[far], minlength=len(works)).astype(np.int64).tolist()


def _of_ranks(
    profile: Profile, works: Sequence[StageWork], ranks: int
) -> tuple[tuple[int, int], ...]:
    """Bytes of parameters on each rank, and of those that are trained."""
    found = []
    for rank in range(ranks):
        held = held_parameters(profile, [(w.first, w.end) for w in works[rank::ranks]])
        found.append((sum(p.bytes for p in held), sum(p.bytes for p in held if p.trainable)))
    return tuple(found)


def gathered_sizes(profile: Profile, held: Sequence[Parameter], plan: Plan) -> list[int]:
    """Bytes of what ZeRO 3 gathers at once: parameters by the block that reads them, and outside
    blocks each, in the dtype in which they travel."""
    groups: dict[str, int] = defaultdict(int)
    for parameter in held:
        blocks = {int(profile.block_at[p]) for p in parameter.positions}
        one = blocks.pop() if len(blocks) == 1 else -1
        groups[profile.block_names[one] if one >= 0 else parameter.name] += parameter.bytes
    return [size // 2 if plan.gathers_low else size for size in groups.values()]


@dataclass(frozen=True)
class _Peak:
    activation: int
    temporary: int
    gradient: int
    at: str

    def waiting(self, microbatches: int, kept: int) -> _Peak:
        """With so many in flight, of which each keeps `kept`, in place of one."""
        more = self.activation + (microbatches - 1) * kept
        return _Peak(more, self.temporary, self.gradient, self.at)


def _stage_peak(
    profile: Profile,
    sized: SizedProfile,
    work: StageWork,
    saved: np.ndarray,
    again: np.ndarray,
    accumulated: bool,
    plan: Plan,
) -> tuple[_Peak, int]:
    """Where a stage holds most with one microbatch in flight, and what one more keeps.

    accumulated: gradients lie in buckets the whole step; otherwise they come as backward proceeds.
    plan: what ZeRO gathers and reduces.
    """
    here = slice(work.first, work.end)
    key = (
        "peak", work.first, work.end, saved[here].tobytes(), again[here].tobytes(), accumulated,
        motion_key(plan), plan.offload,
    )  # fmt: skip
    return sized.once(
        key,
        lambda: _one_waiting(profile, sized, work, saved[here], again[here], accumulated, plan),
    )


def _one_waiting(
    profile: Profile,
    sized: SizedProfile,
    work: StageWork,
    saved: np.ndarray,
    again: np.ndarray,
    accumulated: bool,
    plan: Plan,
) -> tuple[_Peak, int]:
    """As `_stage_peak`; saved and again of the stage's positions."""
    here = slice(work.first, work.end)
    moving = in_motion(profile, plan, (work.first, work.end))
    running = np.cumsum(saved)
    # What a block makes again is alive from the block's end down to where backward reads it.
    remade = np.zeros(work.end - work.first, dtype=np.int64)
    if again.any():
        for block in {b for b in profile.block_at[here].tolist() if b >= 0}:
            inside = profile.block_at[here] == block
            remade[inside] = np.cumsum(again[inside])
    backward = sized.passing_backward[here] + remade
    ready = np.zeros_like(remade)
    if not accumulated:
        made = sized.gradients[here]
        ready = np.cumsum(made[::-1])[::-1] - made  # of later positions: backward did those first
    forward = sized.passing_forward[here]
    if "activations" in plan.offload:
        moved = beside(profile, away_bytes(profile, sized, plan), here)
        forward, backward = forward + moved, backward + moved
    if moving is not None:
        forward, backward = forward + moving.forward, backward + moving.backward
        ready = moving.ready
    choices = (
        ("forward", forward, np.zeros_like(ready)),
        ("backward", backward, ready),
    )
    phase, passing, early = max(choices, key=lambda c: int((running + c[1] + c[2]).max()))
    top = int((running + passing + early).argmax())
    module = profile.modules[work.first + top] or profile.names[work.first + top]
    gradient = int(early[top]) if moving or not accumulated else work.gradient
    peak = _Peak(int(running[top]), int(passing[top]), gradient, f"{phase} of {module}")
    return peak, int(running[-1])
