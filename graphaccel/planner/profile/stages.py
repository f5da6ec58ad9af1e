"""The best pipeline cuts of a step, by dynamic programming over the candidate positions.

Of S stages the slowest counts
first, since a pipeline runs at its pace; among equally slow choices the sum of squares of all
stages decides, so that the rest is even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from graphaccel.errors import BadPin, TooManyStages
from graphaccel.planner.plan.module_pins import is_inside
from graphaccel.planner.profile.candidate_cuts import candidate_cuts
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile

_NEAR = 1 + 4e-9  # closer costs are compared later


def partition(cost: np.ndarray, stages: int, allowed: np.ndarray | None = None) -> list[int] | None:
    """Split points 0 = c0 < c1 < ... < cS = K that minimise the largest segment cost.

    cost[i, j]: cost of a segment from split point i to j (i < j), K + 1 points. allowed[s, i, j]:
    whether stage s may be that segment. None when there is no such split. Ties go to the least sum
    of squares, then to the earliest cuts.
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


@dataclass(frozen=True, eq=False)
class Chain:
    """The points at which a sequence may be cut, both ends included: seconds of the work before
    each, and of the messages that a cut there costs; `ends`: the position before each."""

    ends: np.ndarray
    work: np.ndarray
    message: np.ndarray

    def cost(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Seconds of the segments from points `i` to points `j`."""
        return np.maximum(self.work[j] - self.work[i], 0.0) + self.message[i] + self.message[j]

    @property
    def table(self) -> np.ndarray:
        """[i, j]: seconds of every segment."""
        points = np.arange(len(self.ends))
        return self.cost(points[:, None], points[None, :])


@dataclass(frozen=True)
class StageLimit:
    """Memory limits of stages for the choice of cuts: bytes per parameter byte in all (weights,
    gradients, optimizer state), microbatches in flight and tensor budget in bytes, per stage."""

    per_parameter_byte: float
    in_flight: Sequence[int]
    budget: Sequence[float]


class Room:
    """The memory of the segments of a chain.

    held: bytes of parameters before each point; waiting: bytes that are saved of one microbatch;
    passing: the peak bytes of computing between a point and the one before it.
    """

    def __init__(
        self, profile: Profile, sized: SizedProfile, saved: np.ndarray, ends: np.ndarray
    ) -> None:
        """saved: bytes per position. Tied parameters count where they are first used."""
        held = np.zeros(len(profile))
        for parameter in profile.parameters:
            held[parameter.positions[0] if parameter.positions else 0] += parameter.bytes
        self.held = np.concatenate([[0.0], np.cumsum(held)])[ends + 1]
        self.waiting = np.concatenate([[0.0], np.cumsum(saved)])[ends + 1]
        passing = np.maximum(sized.passing_forward, sized.passing_backward)
        self.passing = np.maximum.reduceat(passing, ends[:-1] + 1)  # of the segment that starts

    def first(self, limit: StageLimit) -> np.ndarray:
        """For each point the first one from which a segment may lead to it on any stage."""
        least = self.held * limit.per_parameter_byte + self.waiting * min(limit.in_flight)
        result = np.searchsorted(least, least - max(limit.budget) * (1 + 1e-9) - 1.0)
        return np.minimum(result, np.arange(len(least)))

    def enough(self, limit: StageLimit, stages: int) -> bool:
        """Whether stages that are each as long as their memory allows reach the end; otherwise no
        split fits: part of a segment that fits does too."""
        far, last = 0, len(self.held) - 1
        for stage in range(stages):
            fixed = (self.held[far + 1 :] - self.held[far]) * limit.per_parameter_byte
            fixed = fixed + np.maximum.accumulate(self.passing[far:])
            fits = Fits(fixed, self.waiting[far + 1 :] - self.waiting[far], limit)
            far += int(fits.on(stage, slice(None)).sum())
            if far == last:
                return True
        return False

    def fits(self, limit: StageLimit, i: np.ndarray, j: np.ndarray) -> Fits:
        """Which stages may be the segments from `i` to `j`: windows of points that end before `j`,
        in rows."""
        running = np.maximum.accumulate(self.passing[i][:, ::-1], axis=1)[:, ::-1]
        fixed = (self.held[j] - self.held[i]) * limit.per_parameter_byte + running
        return Fits(fixed, self.waiting[j] - self.waiting[i], limit)


@dataclass(frozen=True, eq=False)
class Fits:
    """Segments in rows: the bytes that each holds in any case, and for each microbatch in
    flight."""

    fixed: np.ndarray
    one: np.ndarray
    limit: StageLimit

    def on(self, stage: int, rows: slice) -> np.ndarray:
        """Which segments a stage may be."""
        taken = self.fixed[rows] + self.one[rows] * self.limit.in_flight[stage]
        return taken <= self.limit.budget[stage]


def split_evenly(
    chain: Chain, stages: int, room: Room | None = None, limit: StageLimit | None = None
) -> list[int] | None:
    """The result of `partition` for a chain, without considering segments that are far too long.

    A split whose longest segment takes `most` seconds has no segment with more work than that. So
    it is enough to look back from each point that far, and where no split is found, twice as far.
    """
    points = len(chain.ends)
    if points - 1 < stages:
        return None
    most = _evenly_spaced(chain, stages)
    back = np.zeros(points, dtype=np.int64)
    if room is not None and limit is not None:
        if not room.enough(limit, stages):
            return None
        back = room.first(limit)
    while True:
        first = np.maximum(back, np.searchsorted(chain.work, chain.work - most * _NEAR) - 1)
        whole = bool((first <= back).all())
        result = _within(chain, stages, first, np.inf if whole else most, room, limit)
        if result is not None or whole:
            return result
        most *= 2


def _evenly_spaced(chain: Chain, stages: int) -> float:
    """Seconds of the longest segment of one split that is about even."""
    points = len(chain.ends)
    wanted = chain.work[-1] / stages * np.arange(1, stages)
    inner = np.searchsorted(chain.work, wanted)
    step = np.arange(1, stages)
    spare = np.maximum.accumulate(np.clip(inner - step, 0, points - 1 - stages))
    ends = np.concatenate([[0], spare + step, [points - 1]])  # ascending, so that none is empty
    return float(chain.cost(ends[:-1], ends[1:]).max())


def _within(
    chain: Chain,
    stages: int,
    first: np.ndarray,
    most: float,
    room: Room | None,
    limit: StageLimit | None,
) -> list[int] | None:
    """The best split among those whose segments start at `first` of their end or later, and take at
    most `most` seconds."""
    points = len(first)
    width = int((np.arange(points) - first).max())
    skip = 0 if room is not None else _too_short(chain, stages, most)
    if width <= skip:
        return None
    j = np.arange(points)[:, None]
    i = j - width + np.arange(width - skip)[None, :]
    real = i >= 0
    i = np.maximum(i, 0)
    cost = np.where(real, chain.cost(i, j), np.inf)
    cost[cost > most * _NEAR] = np.inf
    allowed = None
    if room is not None and limit is not None:
        allowed = room.fits(limit, i, j)
    bottleneck = _band(cost, width, stages, allowed, np.maximum)
    if bottleneck is None:
        return None
    ends = np.array(bottleneck)
    slowest = float(chain.cost(ends[:-1], ends[1:]).max())
    if slowest > most:  # equals among the longest may have been left out
        return None
    cost[cost > slowest * (1 + 1e-9)] = np.inf
    even = _band(cost**2, width, stages, allowed, np.add)
    return even if even is not None else bottleneck


def _too_short(chain: Chain, stages: int, most: float) -> int:
    """The number of nearest points before each point at which no segment of a split starts: where
    the others take at most `most` seconds, it has the rest of the work."""
    work, least = chain.work, chain.work[-1] - (stages - 1) * most * _NEAR
    if least <= 0:
        return 0
    last = np.searchsorted(work, work - least * (1 - 1e-9), side="right") - 1  # before each point
    reached = last >= 0
    return max(0, int((np.arange(len(work)) - last)[reached].min()) - 1) if reached.any() else 0


def _band(
    cost: np.ndarray, width: int, stages: int, allowed: Fits | None, combine: np.ufunc
) -> list[int] | None:
    """As `_shortest`; cost[j, d]: of the segment to point j from point j - width + d. For each
    stage it considers only the points at which that stage can end in a full split."""
    points, columns = cost.shape
    spans = _reach(cost, width, stages)
    if any(low > high for low, high in spans):
        return None
    best = np.full(width + points, np.inf)
    best[width] = 0.0
    windows = sliding_window_view(best, width)[:, :columns]
    choices: list[np.ndarray] = []
    for stage, (start, last) in enumerate(spans):
        end = last + 1
        table = combine(windows[start:end], cost[start:end])
        if allowed is not None:
            table[~allowed.on(stage, slice(start, end))] = np.inf
        choice = table.argmin(axis=1)
        choices.append(choice)
        best[:] = np.inf
        best[width + start : width + end] = table[np.arange(end - start), choice]
    if not np.isfinite(best[-1]):
        return None
    splits = [points - 1]
    for choice, (start, _) in zip(reversed(choices), reversed(spans), strict=True):
        splits.append(splits[-1] - width + int(choice[splits[-1] - start]))
    return splits[::-1]


def _reach(cost: np.ndarray, width: int, stages: int) -> list[tuple[int, int]]:
    """The first and the last point at which each stage can end, over segments of finite cost; for
    some stage the first is after the last where there is no split."""
    points = len(cost)
    possible = np.isfinite(cost)
    longest = np.arange(points) - width + possible.argmax(axis=1)  # where it starts, to each point
    start = np.where(possible.any(axis=1), longest, points)
    least = np.minimum.accumulate(start[::-1])[::-1]  # to this point or a later one
    far = (np.searchsorted(least, np.arange(points), side="right") - 1).tolist()
    low, high = [points - 1], [0]
    for _ in range(stages):
        low.append(int(least[min(low[-1], points - 1)]))
        high.append(far[max(high[-1], 0)])
    return [
        (max(first, stage + 1), min(last, points - stages + stage))
        for stage, (first, last) in enumerate(zip(low[-2::-1], high[1:], strict=True))
    ]


def chain_of(
    profile: Profile, sized: SizedProfile, seconds_per_byte: float, message_seconds: float
) -> Chain:
    """The points where a step may be cut, and what each cut costs (see `choose_cuts`)."""
    costs = seconds_per_byte, message_seconds
    return sized.analyses.cached(costs, _chain, profile, sized, *costs)


def _chain(
    profile: Profile, sized: SizedProfile, seconds_per_byte: float, message_seconds: float
) -> Chain:
    candidates = candidate_cuts(profile, sized)
    ends = np.array([-1, *candidates.positions, len(profile) - 1])
    work = np.concatenate([[0.0], np.cumsum(sized.forward + sized.backward)])[ends + 1]
    message = [0.0, *(message_seconds + n * seconds_per_byte for n in candidates.bytes), 0.0]
    return Chain(ends, work, np.array(message))


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
    direction. saved: bytes per position that are saved for the backward (needed with `limit`).
    pinned: the stage of modules, by path.

    Raises: TooManyStages (GA203) when the graph has fewer cuts than `stages - 1`, BadPin (GA202)
    when no cuts put the pinned modules on their stages.
    """
    if stages == 1:
        return ()
    candidates = candidate_cuts(profile, sized)
    if len(candidates.positions) < stages - 1:
        raise TooManyStages(asked=stages, possible=len(candidates.positions) + 1)
    chain = chain_of(profile, sized, seconds_per_byte, message_seconds)
    room = None
    if limit is not None:
        assert saved is not None
        room = Room(profile, sized, saved, chain.ends)
    if pinned:
        splits = _with_pinned(profile, chain, stages, pinned, room, limit)
    else:
        splits = split_evenly(chain, stages, room, limit)
    if splits is None:
        return None
    return tuple(profile.names[chain.ends[i]] for i in splits[1:-1])


def _with_pinned(
    profile: Profile,
    chain: Chain,
    stages: int,
    pinned: Sequence[tuple[str, int]],
    room: Room | None,
    limit: StageLimit | None,
) -> list[int] | None:
    """The best split in which the pinned modules are on their stages only."""
    cost, points = chain.table, len(chain.ends)
    held = np.ones((stages, points, points), dtype=bool)
    for path, stage in pinned:
        inside = np.array([is_inside(module, path) for module in profile.modules])
        before = np.concatenate([[0], np.cumsum(inside)])[chain.ends + 1]
        touched = before[None, :] > before[:, None]
        for other in range(stages):
            if other != stage:
                held[other] &= ~touched
    if partition(cost, stages, held) is None:
        reason = f"no {stages - 1} cuts make {stages} stages with these modules on theirs"
        raise BadPin(pin="stage_of", value=dict(pinned), reason=reason)
    if room is None or limit is None:
        return partition(cost, stages, held)
    for j in range(1, points):
        i = np.arange(j)[None, :]
        fits = room.fits(limit, i, np.array([[j]]))
        for stage in range(stages):
            held[stage, :j, j] &= fits.on(stage, slice(None))[0]
    return partition(cost, stages, held)
