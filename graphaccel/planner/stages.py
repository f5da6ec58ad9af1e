"""Where a step can be cut into stages, and the best cuts.

A cut is a position of the forward graph. Its cost is what crosses it: every value made at or
before it and used after it is sent on, and its gradient comes back. Values that depend on batch
and constants only (masks, positions) and casts of parameters do not cross: each stage makes its
own.

The cuts are chosen by dynamic programming over candidate positions. Of S stages the slowest counts
first, since a pipeline runs at its pace; among equally slow choices the sum of squares of all
stages decides, so that the rest is even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graphaccel.errors import BadPin, TooManyStages
from graphaccel.planner.module_pins import is_inside
from graphaccel.planner.profile import Profile, SizedProfile


@dataclass(frozen=True)
class Candidates:
    """Positions after which a stage may end, ascending, and bytes of activations that cross
    each.
    """

    positions: tuple[int, ...]
    bytes: tuple[int, ...]


def candidate_cuts(profile: Profile, sized: SizedProfile) -> Candidates:
    """Local minima of the crossing bytes, with a parameter used between any two and at both ends.

    Of several cuts between which no parameter is used the one with fewest bytes is kept, the
    latest of equals: an activation function stays with the layer before it.
    """
    used = np.zeros(len(profile) + 1, dtype=np.int64)
    for parameter in profile.parameters:
        if parameter.trainable and parameter.positions:
            used[parameter.positions[0]] += 1
    used = np.cumsum(used)[:-1]
    between = (used > 0) & (used < used[-1])
    crossing = np.where(between, _crossing_bytes(profile, sized), np.iinfo(np.int64).max)
    makes = {storage.at for storage, _ in profile.crossing}
    best: dict[int, int] = {}
    for position in _local_minima(crossing):
        count = int(used[position])
        if position not in makes or not between[position]:
            continue
        if count not in best or crossing[position] <= crossing[best[count]]:
            best[count] = position
    chosen = sorted(best.values())
    return Candidates(tuple(chosen), tuple(int(crossing[p]) for p in chosen))


def _crossing_bytes(profile: Profile, sized: SizedProfile) -> np.ndarray:
    """Bytes of activations that cross a cut after each position."""
    change = np.zeros(len(profile) + 1, dtype=np.int64)
    for storage, positions in profile.crossing:
        change[storage.at] += sized.bytes[storage.index]
        change[positions[-1]] -= sized.bytes[storage.index]
    return np.cumsum(change)[:-1]


def _local_minima(values: np.ndarray) -> list[int]:
    """Positions in runs of equal values that are higher on both sides (ends count as higher)."""
    edges = np.flatnonzero(np.diff(values)) + 1
    runs = np.split(np.arange(len(values)), edges)
    minima: list[int] = []
    for k, run in enumerate(runs):
        level = values[run[0]]
        before = k == 0 or values[runs[k - 1][0]] > level
        after = k + 1 == len(runs) or values[runs[k + 1][0]] > level
        if before and after:
            minima += run.tolist()
    return minima


def partition(cost: np.ndarray, stages: int, allowed: np.ndarray | None = None) -> list[int] | None:
    """Split points 0 = c0 < c1 < ... < cS = K so that the largest segment cost is least.

    cost[i, j]: cost of a segment from split point i to j (i < j), K + 1 points.
    allowed[s, i, j]: whether stage s may be that segment. None when there is no such split.
    Ties go to the least sum of squares, then to the earliest cuts.
    """
    points = cost.shape[0]
    rows, columns = np.indices(cost.shape)
    possible = np.broadcast_to(rows < columns, (stages, points, points))
    if allowed is not None:
        possible = possible & allowed
    bottleneck = _shortest(cost, possible, np.maximum)
    if bottleneck is None:
        return None
    slowest = max(cost[i, j] for i, j in pairwise(bottleneck))
    even = _shortest(cost**2, possible & (cost <= slowest * (1 + 1e-9)), np.add)
    return even if even is not None else bottleneck


def _shortest(cost: np.ndarray, possible: np.ndarray, combine: np.ufunc) -> list[int] | None:
    """Split points that minimise `combine` over the segments' costs."""
    stages, points, _ = possible.shape
    best = np.full(points, np.inf)
    best[0] = 0.0
    choices: list[np.ndarray] = []
    for stage in range(stages):
        table = np.where(possible[stage], combine(best[:, None], cost), np.inf)
        choices.append(table.argmin(axis=0))
        best = table.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    splits = [points - 1]
    for choice in reversed(choices):
        splits.append(int(choice[splits[-1]]))
    return splits[::-1]


@dataclass(frozen=True)
class StageLimit:
    """Memory of stages for the choice of cuts: bytes a parameter byte takes in all (weights,
    gradients, optimizer state), microbatches in flight and tensor bytes to spare, per stage."""

    per_parameter_byte: float
    in_flight: Sequence[int]
    budget: Sequence[float]


def choose_cuts(
    profile: Profile,
    sized: SizedProfile,
    stages: int,
    seconds_per_byte: float,
    message_seconds: float,
    *,
    saved: np.ndarray | None = None,
    limit: StageLimit | None = None,
    pinned: Sequence[tuple[str, int]] = (),
) -> tuple[str, ...] | None:
    """Names of the forward nodes after which stages end; None when `limit` leaves no choice.

    A message of n bytes over a cut costs `message_seconds + n * seconds_per_byte` in each
    direction. saved: bytes per position that wait for backward (needed with `limit`). pinned: the
    stage of modules, by path.

    Raises: TooManyStages (GA203) when the graph has fewer cuts than `stages - 1`, BadPin (GA202)
    when no cuts put the pinned modules on their stages.
    """
    if stages == 1:
        return ()
    candidates = candidate_cuts(profile, sized)
    if len(candidates.positions) < stages - 1:
        raise TooManyStages(asked=stages, possible=len(candidates.positions) + 1)
    ends = np.array([-1, *candidates.positions, len(profile) - 1])
    work = np.concatenate([[0.0], np.cumsum(sized.forward + sized.backward)])[ends + 1]
    message = np.array(
        [0.0, *(message_seconds + n * seconds_per_byte for n in candidates.bytes), 0.0]
    )
    cost = np.maximum(work[None, :] - work[:, None], 0.0) + message[:, None] + message[None, :]
    held = None
    if pinned:
        held = _with_pinned(profile, ends, stages, pinned)
        if partition(cost, stages, held) is None:
            reason = f"no {stages - 1} cuts make {stages} stages with these modules on theirs"
            raise BadPin(pin="stages", value=dict(pinned), reason=reason)
    allowed = held
    if limit is not None:
        assert saved is not None
        allowed = _fitting(profile, sized, saved, ends, stages, limit)
        allowed = allowed if held is None else allowed & held
    splits = partition(cost, stages, allowed)
    if splits is None:
        return None
    return tuple(profile.names[ends[i]] for i in splits[1:-1])


def _with_pinned(
    profile: Profile, ends: np.ndarray, stages: int, pinned: Sequence[tuple[str, int]]
) -> np.ndarray:
    """[stage, i, j]: whether a segment may be the stage: it has nothing of another's modules."""
    points = len(ends)
    allowed = np.ones((stages, points, points), dtype=bool)
    for path, stage in pinned:
        inside = np.array([is_inside(module, path) for module in profile.modules])
        before = np.concatenate([[0], np.cumsum(inside)])[ends + 1]
        touched = before[None, :] > before[:, None]
        for other in range(stages):
            if other != stage:
                allowed[other] &= ~touched
    return allowed


def _fitting(
    profile: Profile,
    sized: SizedProfile,
    saved: np.ndarray,
    ends: np.ndarray,
    stages: int,
    limit: StageLimit,
) -> np.ndarray:
    """[stage, i, j]: whether the segment fits the stage. Tied parameters count where first used."""
    held = np.zeros(len(profile))
    for parameter in profile.parameters:
        held[parameter.positions[0] if parameter.positions else 0] += parameter.bytes
    per_parameter = np.concatenate([[0.0], np.cumsum(held)])[ends + 1]
    waiting = np.concatenate([[0.0], np.cumsum(saved)])[ends + 1]
    passing = np.maximum(sized.passing_forward, sized.passing_backward)
    allowed = np.zeros((stages, len(ends), len(ends)), dtype=bool)
    for i, start in enumerate(ends[:-1]):
        running = np.maximum.accumulate(passing[start + 1 :])
        for j in range(i + 1, len(ends)):
            fixed = (per_parameter[j] - per_parameter[i]) * limit.per_parameter_byte
            fixed += running[ends[j] - start - 1]
            one = waiting[j] - waiting[i]
            for stage in range(stages):
                total = fixed + one * limit.in_flight[stage]
                allowed[stage, i, j] = total <= limit.budget[stage]
    return allowed


def stage_positions(profile: Profile, cuts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) position of each stage.

    Raises: ValueError for cuts that are no forward nodes or not in ascending order.
    """
    unknown = [name for name in cuts if name not in profile.position]
    if unknown:
        raise ValueError(f"no node of the forward graph is called {unknown[0]}")
    ends = [-1, *(profile.position[name] for name in cuts), len(profile) - 1]
    if any(a >= b for a, b in pairwise(ends)):
        raise ValueError("cuts must be in the order of the forward graph and leave no stage empty")
    return tuple((a + 1, b + 1) for a, b in pairwise(ends))
