"""Lower bounds on seconds that count what memory forces a candidate to recompute, or to copy.

A device has room for some of what the forward saves. Where it has too little for any way to place
the layers on the ranks of the pipeline, something is recomputed, and a rank that recomputes takes
longer. The bound relaxes the choice: layers are divided at will, the options of a block are mixed
at will, and only one kind of blocks takes memory, where there are several ranks. Rank r of P holds
min(m, P - r) of m microbatches or more, so that late ranks need the least recomputation; a plan of
at most `limit` seconds gives each of them at most `limit` / m of a microbatch's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from graphaccel.planner.estimate.stage_costs import least_flight
from graphaccel.planner.estimate.weight_inputs import weight_inputs
from graphaccel.planner.plan.offload import LARGE
from graphaccel.planner.search.bounds import (
    Bounds,
    over_parameters,
    recompute_curve,
    sized_profile,
)
from graphaccel.planner.search.candidate_columns import Columns
from graphaccel.planner.search.candidates import Layout
from graphaccel.planner.search.recompute import BlockOption, block_options

_ROWS = 100_000  # of candidates times ranks that are computed at once
_CLOSE = 0.002


@dataclass(frozen=True)
class _Kind:
    """The blocks that save most of all, for one microbatch: bytes they save, bytes that wait for
    gradients of weights, seconds they take, their share of the parameters' bytes; ends: (bytes that
    are freed, seconds of recomputation) at the corners of the cheapest way, from (0, 0) on."""

    kept: float
    waiting: float
    seconds: float
    share: float
    ends: tuple[tuple[float, float], ...]


def seconds_with_memory(
    bounds: Bounds, of: Columns, limit: float, *, recompute: bool = True
) -> np.ndarray:
    """Lower bounds in seconds of the candidates of a layout; infinity where none of `limit` seconds
    or less fits. recompute: whether anything may be recomputed. Of devices whose processes share
    cores they are those of `Bounds.seconds`."""
    if not len(of.small):
        return np.empty(0)
    if bounds.problem.cluster.device.crowd > 1:
        return bounds.seconds(of)
    if "activations" in bounds.offload:
        more = _copied(bounds, of)
    else:
        more = _recomputed(bounds, of, limit, recompute)
    fits = np.isfinite(more)
    return np.where(fits, bounds.seconds(of, more=np.where(fits, more, 0.0)), np.inf)


@dataclass(frozen=True)
class Open:
    """Candidates of a layout that were not solved. least: their bounds; choices: how many ways to
    recompute each has left; recompute: whether that is any."""

    of: Columns
    least: np.ndarray
    choices: int
    recompute: bool

    @property
    def low(self) -> float:
        """Seconds that none of them beats."""
        return float(self.least.min(initial=np.inf))

    def under(self, bounds: Bounds, limit: float) -> Open:
        """Those that `limit` seconds may be enough for."""
        near = self.of.of(self.least <= limit)
        least = seconds_with_memory(bounds, near, limit, recompute=self.recompute)
        some = least <= limit
        return Open(near.of(some), least[some], self.choices, self.recompute)


def least_open(bounds: Bounds, rows: Sequence[Open], limit: float) -> float:
    """Seconds that none of these candidates beats, at most `limit`. What a candidate of fewer
    seconds recomputes is more: the least seconds at which one is possible are found by halving."""
    low, high = min((own.low for own in rows), default=limit), limit
    while low < high - _CLOSE * limit:
        middle = (low + high) / 2
        some = [own.under(bounds, middle) for own in rows]
        if any(len(own.least) for own in some):
            rows, high = some, middle
        else:
            low = middle
    return low


def _copied(bounds: Bounds, of: Columns) -> np.ndarray:
    """Least seconds that copies of activations and recomputation add to a microbatch, all ranks
    together: what is recomputed is not copied. Copies back delay the backward, those to the host
    what the forward does not hide."""
    host, sums, extra = bounds.problem.cluster.host, bounds.sums(of), _extra(bounds, of)
    assert host is not None
    sizes, place = of.sizes
    known = bounds.nearest(of.layout)
    forward = (sums.work - sums.backward) / extra
    result = np.empty(len(of.small))
    for number, size in enumerate(sizes):
        here = place == number
        shares, costs = bounds.cached(recompute_curve, known, size)
        left = sums.kept[here] - np.outer(shares, sums.kept[here] - sums.lean[here])
        up = np.maximum(0.0, left - bounds.cached(_small, known, size)) / extra / host.link
        down = up if host.shared else np.maximum(0.0, up - forward[here])
        result[here] = (np.outer(costs, forward[here]) + up + down).min(axis=0)
    return result


def _small(bounds: Bounds, known: Layout, size: int) -> int:
    """Bytes of values that are too small to be offloaded."""
    _, sized = sized_profile(bounds, known, size)
    return int(sized.bytes[sized.bytes < LARGE].sum())


def _extra(bounds: Bounds, of: Columns) -> int:
    return of.layout.model_parallel_size // bounds.nearest(of.layout).model_parallel_size


def _recomputed(bounds: Bounds, of: Columns, limit: float, some: bool) -> np.ndarray:
    """Least seconds of recomputation of a microbatch, all ranks together; infinity where that does
    not fit. some: whether anything may be recomputed."""
    result, many = np.zeros(len(of.small)), of.pipeline > 1
    if not many.all():
        result[~many] = _of_one_rank(bounds, of.of(~many), some)
    sizes, place = of.sizes
    shapes = np.stack([of.pipeline, of.interleave, place])
    for ranks, each, number in np.unique(shapes[:, many], axis=1).T.tolist():
        rows = np.flatnonzero((shapes.T == (ranks, each, number)).all(axis=1))
        for start in range(0, len(rows), _ROWS // ranks):
            here = rows[start : start + _ROWS // ranks]
            own = of.of(here)
            flight = np.stack([least_flight(ranks, each, m) for m in own.microbatches.tolist()])
            result[here] = _of_ranks(bounds, own, flight, sizes[number], limit, some)
    return result


def _of_one_rank(bounds: Bounds, of: Columns, some: bool) -> np.ndarray:
    """Without a pipeline: what does not fit beside parameters and state is recomputed."""
    known, sums, extra = bounds.nearest(of.layout), bounds.sums(of), _extra(bounds, of)
    room = bounds.problem.cluster.tensor_budget - _resident(bounds, of)
    short = sums.kept / extra - room
    free = np.maximum(sums.kept - sums.lean, 1.0) / extra
    forward = (sums.work - sums.backward) / extra
    result, (sizes, place) = np.empty(len(short)), of.sizes
    for number, size in enumerate(sizes):
        here = place == number
        shares, costs = bounds.cached(recompute_curve, known, size)
        asked = np.clip(short[here] / free[here], 0.0, 1.0)
        result[here] = forward[here] * np.interp(asked, shares, costs)
    return np.where(short > (free if some else 0.0), np.inf, result)


def _resident(bounds: Bounds, of: Columns) -> np.ndarray:
    return bounds.resident(of) / over_parameters(of.layout, bounds.nearest(of.layout))


def _of_ranks(
    bounds: Bounds, of: Columns, flight: np.ndarray, size: int, limit: float, some: bool
) -> np.ndarray:
    """With a pipeline: each rank takes the work that needs no recomputation, then what needs the
    least a second of work, up to its time; infinity where that is too little."""
    kind = bounds.cached(_kind, bounds.nearest(of.layout), size)
    if kind is None:
        return np.zeros(len(of.small))
    kind = kind if some else replace(kind, ends=kind.ends[:1])
    extra, budget = _extra(bounds, of), bounds.problem.cluster.tensor_budget
    # As `planner.estimate.weight_inputs`: of so many microbatches only weights' gradients are left.
    rank = np.arange(flight.shape[1])
    behind = np.minimum(rank, np.maximum(of.microbatches[:, None] - flight, 0))
    late = np.where(of.apart[:, None], behind * kind.waiting / extra, 0.0)
    # Per unit of work: bytes of a microbatch, with what else a rank holds.
    held = kind.share * _resident(bounds, of)[:, None]
    whole = kind.kept / extra + (held + late) / flight
    room = budget / flight
    most, cost = _stretches(kind, whole, room, extra, limit / of.microbatches[:, None])
    order = np.argsort(cost, axis=1, kind="stable")
    most = np.take_along_axis(most, order, axis=1)
    cost = np.take_along_axis(cost, order, axis=1)
    before = np.cumsum(most, axis=1) - most
    taken = np.clip(1.0 - before, 0.0, most)
    enough = before[:, -1] + most[:, -1] >= 1.0 - 1e-9
    return np.where(enough, (taken * cost).sum(axis=1), np.inf)


def _stretches(
    kind: _Kind, whole: np.ndarray, room: np.ndarray, extra: int, time: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(work, seconds of recomputation a unit of work) of each rank's stretches, the cheapest first:
    up to the work of which nothing, or all that an option frees, must be freed. whole: bytes of all
    work; room: bytes that a rank has for a microbatch; time: seconds of a rank."""
    work = kind.seconds / extra
    ends = [(freed / extra, seconds / extra) for freed, seconds in kind.ends]
    mosts: list[Any] = []
    costs: list[Any] = []
    reached, spent = np.zeros(whole.shape), np.zeros(whole.shape)
    rates = [0.0, *((b[1] - a[1]) / max(b[0] - a[0], 1e-9) for a, b in pairwise(ends))]
    corners = zip(ends, [ends[0], *ends], rates, strict=False)
    for (freed, _), (before, paid), rate in corners:
        # x units of work with a cost between two ends: paid x + rate (whole x - room - before x)
        left = whole - freed
        end = np.where(left > 0, room / np.maximum(left, 1e-9), np.inf)
        slope = paid + rate * (whole - before)
        until = np.minimum(end, reached + (time - reached * work - spent) / (work + slope))
        until = np.maximum(np.minimum(until, 1.0), reached)
        mosts.append(until - reached)
        costs.append(np.broadcast_to(slope, whole.shape))
        spent = spent + (until - reached) * slope
        reached = until
    return np.concatenate(mosts, axis=1), np.concatenate(costs, axis=1)


def _kind(bounds: Bounds, known: Layout, size: int) -> _Kind | None:
    """The kind of blocks that saves most; None where there are no blocks that recompute."""
    profile, sized = sized_profile(bounds, known, size)
    options = block_options(profile, sized)
    saved, _ = sized.saved(profile.no_recomputation)
    best: _Kind | None = None
    for kind in profile.block_kinds:
        own = np.isin(profile.block_at, kind.blocks)
        kept = float(saved[own].sum())
        ways = options[kind.blocks[0]]
        if (best is not None and best.kept >= kept) or not ways:
            continue
        busy = sized.forward + sized.backward - 2 * np.maximum(sized.casts, sized.held_casts)
        read = [p for p in profile.parameters if p.positions]
        inside = sum(p.bytes for p in read if own[list(p.positions)].all())
        share = inside / max(1, sum(p.bytes for p in profile.parameters))
        waiting = float(weight_inputs(profile, sized)[own].sum())
        corners = _corners(ways, len(kind.blocks))
        best = _Kind(kept, waiting, float(busy[own].sum()), share, corners)
    return best


def _corners(ways: Sequence[BlockOption], count: int) -> tuple[tuple[float, float], ...]:
    """(bytes freed, seconds) of `count` blocks, the cheapest bytes first."""
    ends = [(0, 0.0), *((way.saved_bytes, way.seconds) for way in ways)]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)]
    freed = seconds = 0.0
    result = [(0.0, 0.0)]
    for size, time in sorted(steps, key=lambda step: step[1] / step[0]):
        freed, seconds = freed + count * size, seconds + count * time
        result.append((freed, seconds))
    return tuple(result)
