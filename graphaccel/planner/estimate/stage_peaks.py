"""Peak memory of each stage with one microbatch in flight, for all stages of a plan at once.

It works on columns over the positions of the graph, of which each stage has a contiguous range:
running sums restart at the first position of each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphaccel.planner.estimate.activation_offload import beside, offloaded_bytes
from graphaccel.planner.estimate.parameter_prefetch import uploaded
from graphaccel.planner.estimate.stage_costs import StageCost
from graphaccel.planner.estimate.zero_memory import (
    BytesInFlight,
    bytes_in_flight,
    bytes_in_flight_key,
)
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.block_recompute import Recomputation
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True, eq=False)
class Peaks:
    """Bytes of each stage (int64) at its peak. kept: bytes that each further microbatch saves.
    position: where the peak is; late: whether it is in the backward."""

    activation: np.ndarray
    temporary: np.ndarray
    gradient: np.ndarray
    kept: np.ndarray
    position: np.ndarray
    late: np.ndarray

    def at(self, profile: Profile, stage: int) -> str:
        """Where the peak of a stage is, in words."""
        place = int(self.position[stage])
        phase = "backward" if self.late[stage] else "forward"
        return f"{phase} of {profile.modules[place] or profile.names[place]}"


def stage_peaks(
    profile: Profile, sized: SizedProfile, costs: Sequence[StageCost], plan: Plan
) -> Peaks:
    """The peak of every stage of `plan`. works: costs of its stages, whatever is recomputed.

    Gradients are held in buckets for the full step where the batch has several parts or gradients
    are reduced over other axes; otherwise they are added as the backward proceeds. What ZeRO
    gathers and reduces is counted where it moves (`planner.estimate.zero_memory`).
    """
    first, stage = sized.analyses.cached(plan.cuts, _stages, costs)
    recomputation = profile.recomputation(plan)
    saved, _ = sized.saved(recomputation)
    offloaded = offloaded_bytes(profile, sized, plan)
    running = _within(saved - offloaded, first, stage)
    whole = plan.microbatches > 1 or plan.data > 1
    accumulated = np.array([whole or bool(work.partial) for work in costs])
    forward, backward = _passing(sized, plan, accumulated[stage])
    if recomputation.rows.any():
        groups = sized.analyses.cached(plan.cuts, _blocks, profile, stage)
        backward = backward + _recomputed(_coming(profile, sized, recomputation, stage), *groups)
    forward, backward = _with_copies(profile, costs, plan, offloaded, (forward, backward))
    gradient = np.array([work.gradient for work in costs])
    request = plan.cuts, bytes_in_flight_key(plan)
    moving = sized.analyses.cached(request, _moving, profile, sized, costs, plan)
    if moving is not None:
        forward, backward, ready = (
            forward + moving.forward,
            backward + moving.backward,
            moving.ready,
        )
    else:  # of later positions: the backward runs those first
        sums = _within(sized.gradients, first, stage)
        ready = np.where(accumulated[stage], 0, _last(sums, first)[stage] - sums)
    ahead, back = running + forward, running + backward + ready
    if moving is not None and plan.microbatches > 1:  # gradients of the microbatches before
        ahead = ahead + np.minimum.reduceat(ready, first)[stage]
    most, late = _higher(ahead, back, first)
    chosen = np.where(late[stage], back, ahead)
    hits = np.flatnonzero(chosen == most[stage])
    _, at = np.unique(stage[hits], return_index=True)
    top = hits[at]
    early = np.where(late, ready[top], 0)
    return Peaks(
        activation=running[top],
        temporary=np.where(late, backward[top], forward[top]),
        gradient=early if moving is not None else np.where(accumulated, gradient, early),
        kept=_last(running, first),
        position=top,
        late=late,
    )


def _passing(
    sized: SizedProfile, plan: Plan, accumulated: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes at each position that only the forward, and only the backward, holds meanwhile.

    accumulated: whether the stage of a position keeps its gradients in buckets.
    """
    forward, backward = sized.passing_forward, sized.passing_backward
    if plan.holds_casts:
        forward, backward = sized.passing_held
    if not bytes_in_flight_key(plan):  # they stay where they are accumulated
        backward = np.where(accumulated, sized.passing_added(plan.holds_casts), backward)
    return forward, backward


def _with_copies(
    profile: Profile,
    costs: Sequence[StageCost],
    plan: Plan,
    offloaded: np.ndarray,
    passing: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Those bytes, with the copies to and from the host that are on their way.

    offloaded: bytes of each position's activations that are offloaded.
    """
    forward, backward = passing
    if "activations" in plan.offload:
        spans = [slice(work.first, work.end) for work in costs]
        moved = np.concatenate([beside(profile, offloaded, here) for here in spans])
        forward, backward = forward + moved, backward + moved
    if "parameters" in plan.offload:
        up = [uploaded(profile, plan, (work.first, work.end)) for work in costs]
        forward = forward + np.concatenate([ahead for ahead, _ in up])
        backward = backward + np.concatenate([back for _, back in up])
    return forward, backward


def _stages(costs: Sequence[StageCost]) -> tuple[np.ndarray, np.ndarray]:
    """(first position of each stage, stage of each position)."""
    first = np.array([work.first for work in costs])
    sizes = [work.end - work.first for work in costs]
    return first, np.repeat(np.arange(len(costs)), sizes)


def _within(values: np.ndarray, first: np.ndarray, stage: np.ndarray) -> np.ndarray:
    """Running sums that restart at each stage."""
    sums = np.cumsum(values)
    return sums - (sums[first] - values[first])[stage]


def _last(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The value at each stage's last position."""
    return values[np.append(first[1:], len(values)) - 1]


def _higher(
    ahead: np.ndarray, back: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(the maximum of each stage, whether it is in the backward)."""
    forward, backward = np.maximum.reduceat(ahead, first), np.maximum.reduceat(back, first)
    return np.maximum(forward, backward), backward > forward


def _blocks(profile: Profile, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions inside blocks, by stage and block; the group of each, one per stage and block; the
    start of each group)."""
    inside = np.flatnonzero(profile.block_at >= 0)
    number = stage[inside] * len(profile.block_names) + profile.block_at[inside]
    order = np.argsort(number, kind="stable")
    _, start, group = np.unique(number[order], return_index=True, return_inverse=True)
    return inside[order], group, start


def _coming(
    profile: Profile, sized: SizedProfile, recomputation: Recomputation, stage: np.ndarray
) -> np.ndarray:
    """By how many bytes recomputed values grow at each position: they are held from the position
    whose backward reads them last up to where they are computed, or to the stage's end."""
    _, _, built, until = profile.saved(recomputation)
    before, size = recomputation.before[built], sized.bytes[built]
    within = (before >= 0) & (stage[before] == stage[until])
    result = np.bincount(until, size, minlength=len(profile))
    result -= np.bincount(before[within], size[within], minlength=len(profile))
    return result.astype(np.int64)


def _recomputed(
    recomputed: np.ndarray, places: np.ndarray, group: np.ndarray, start: np.ndarray
) -> np.ndarray:
    """Running sums of the bytes of recomputed values within each block of each stage."""
    result = np.zeros(len(recomputed), dtype=np.int64)
    result[places] = _within(recomputed[places], start, group)
    return result


def _moving(
    profile: Profile, sized: SizedProfile, costs: Sequence[StageCost], plan: Plan
) -> BytesInFlight | None:
    """What ZeRO has in motion at each position; None where nothing is."""
    spans = [(work.first, work.end) for work in costs]
    parts = [bytes_in_flight(profile, plan, span, exchanged=sized.exchanges) for span in spans]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return BytesInFlight(
        np.concatenate([part.forward for part in known]),
        np.concatenate([part.backward for part in known]),
        np.concatenate([part.ready for part in known]),
    )
