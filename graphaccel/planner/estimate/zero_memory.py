"""Bytes of gathered parameters and reduced gradients under ZeRO at each position of a stage.

Sharded parameters are gathered a group at a time, one group ahead of use, and copied out of it one
by one; sharded gradients are collected in the flat tensor of their group, which is waited for when
the next one is sent (`passes.parameters.gather_parameters`, `passes.gradients.reduce_shards`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graphaccel.planner.estimate.gradient_buckets import bucket_limit
from graphaccel.planner.estimate.zero_shards import kept_whole, padding_bytes
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.step_columns import Parameter


@dataclass
class BytesInFlight:
    """Bytes by position: gathered for the forward, gathered and collected in the backward, and
    shards of gradients that are already reduced."""

    forward: np.ndarray
    backward: np.ndarray
    ready: np.ndarray


@dataclass
class _Region:
    """A range of positions that reads a group. bytes: of the group; taken: of its largest
    parameter, where it has several; trained: of its gradients. late: the backward reads it too."""

    first: int
    last: int
    bytes: int = 0
    taken: int = 0
    trained: int = 0
    members: list[int] = field(default_factory=list)
    late: bool = False

    def add(self, parameter: Parameter, positions: Sequence[int]) -> None:
        self.first, self.last = min(self.first, *positions), max(self.last, *positions)
        self.bytes += parameter.bytes
        self.trained += parameter.bytes * parameter.trainable
        self.late |= parameter.late
        self.members.append(parameter.bytes)
        self.taken = max(self.members) if len(self.members) > 1 else 0


def bytes_in_flight_key(plan: Plan) -> tuple[object, ...]:
    """Equal for plans that have the same bytes in motion at each position of a stage."""
    if plan.zero < 2 or plan.data == 1:
        return ()
    once = plan.microbatches == 1
    each = once or plan.accumulation == "shards"
    gathering = plan.reshard_after_forward, plan.gathers_low
    return (plan.zero == 3, plan.shards, *gathering, once, each, plan.bucket_bytes)


def bytes_in_flight(
    profile: Profile, plan: Plan, span: tuple[int, int], *, exchanged: bool = False
) -> BytesInFlight | None:
    """Bytes in motion while a stage of positions [first, end) computes; None where nothing moves.

    exchanged: gradients are reduced to shards by an all-to-all (`SizedProfile.exchanges`).
    """
    if plan.zero < 2 or plan.data == 1:
        return None
    first, end = span
    moving = BytesInFlight(*np.zeros((3, end - first), dtype=np.int64))
    request = span, plan.zero == 3, plan.bucket_bytes, plan.shards
    regions = profile.analyses.cached(request, _regions, profile, plan, span)
    if plan.zero == 3 and not plan.holds_gathered:
        _gather(moving, plan, regions, _final(profile, span))
    if plan.microbatches == 1 or plan.accumulation == "shards":
        _collect(moving, plan, regions)
    else:  # full gradients are held throughout; shards are computed one by one
        moving.backward += max((r.trained for r in regions), default=0) // plan.shards
        moving.ready += sum(r.trained for r in regions)
    if exchanged:  # the received parts of a group, from when it is sent until the next one is
        for k, region in enumerate(regions):
            sent = regions[k - 1].first if k else 0
            moving.backward[sent : region.first + 1] += region.trained
    return moving


def _regions(profile: Profile, plan: Plan, span: tuple[int, int]) -> list[_Region]:
    first, end = span
    kept, padding = kept_whole(profile, plan), padding_bytes(profile, plan)

    def padded(p: Parameter) -> Parameter:
        return replace(p, bytes=p.bytes + padding[p.name]) if p.name in padding else p

    inside = [(padded(p), [at - first for at in p.positions if first <= at < end])
              for p in map(profile.parameters.__getitem__, profile.read([span]))
              if p.name in profile.parameter_names and p.name not in kept]  # fmt: skip
    used = [(p, places) for p, places in inside if places]
    return _blocks(profile, plan, first, used) if plan.zero == 3 else _buckets(plan, used)


def _blocks(
    profile: Profile, plan: Plan, start: int, used: Sequence[tuple[Parameter, list[int]]]
) -> list[_Region]:
    """A region for each block, and for each range between blocks; in the order of the graph.

    A parameter that several of them read is gathered for each.
    """
    segment = profile.analyses.cached((), _segments, profile)
    regions: dict[tuple[int, int, str], _Region] = {}
    parts: dict[int, int] = defaultdict(int)
    for parameter, places in used:
        by_segment: dict[int, list[int]] = defaultdict(list)
        for at in places:
            block = int(profile.block_at[start + at])
            by_segment[-1 - block if block >= 0 else int(segment[at])].append(at)
        alone = parameter.name if len(by_segment) > 1 else ""
        for number, positions in by_segment.items():
            key = (number, parts[number], alone)
            region = regions.get(key)
            full = region is not None and region.bytes + parameter.bytes > plan.bucket_bytes
            if region is None or (full and number > 0):
                parts[number] += full
                key = (number, parts[number], alone)
                region = regions[key] = _Region(positions[0], positions[0])
            region.add(parameter, positions)
    return sorted(regions.values(), key=lambda r: (r.first, r.last))


def _segments(profile: Profile) -> np.ndarray:
    """For each position the number of the block, or of the range between blocks, that it is in."""
    return np.cumsum(np.diff(profile.block_at, prepend=-2) != 0)


def _buckets(plan: Plan, used: Sequence[tuple[Parameter, list[int]]]) -> list[_Region]:
    """Buckets of gradients, in the order of the graph: the backward fills the last one first."""
    trained = [(p, places) for p, places in used if p.trainable]
    limit = bucket_limit(plan.bucket_bytes, sum(p.bytes for p, _ in trained), scattered=True)
    regions: list[_Region] = []
    for parameter, places in sorted(trained, key=lambda pair: -min(pair[1])):
        if not regions or regions[-1].bytes + parameter.bytes > limit:
            regions.append(_Region(places[0], places[0]))
        regions[-1].add(parameter, [min(places)])
    return regions[::-1]


_Piece = tuple[int, int, int]  # (first position, one past the last, bytes)


def _add(column: np.ndarray, pieces: Sequence[_Piece]) -> None:
    """Add the bytes of ranges of positions to a column, in place."""
    first, end, size = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    change = np.zeros(len(column) + 1, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, np.maximum(first, end), size)
    column += np.cumsum(change)[:-1]


def _final(profile: Profile, span: tuple[int, int]) -> int:
    """The position of a stage from which on what is read stays for the backward, which comes next:
    after the last block, on the last stage."""
    first, end = span
    inside = np.flatnonzero(profile.block_at[first:end] >= 0)
    return int(inside[-1]) + 1 if end == len(profile) and len(inside) else end - first


def _gather(moving: BytesInFlight, plan: Plan, regions: Sequence[_Region], final: int) -> None:
    """Hold a region's group from where the region before it starts, up to its own end. What stays
    for the backward is not cast before, and what the backward gathers first it gathers at once."""
    if plan.gathers_low:
        regions = [
            r if r.first >= final else replace(r, bytes=r.bytes // 2, taken=r.taken // 2)
            for r in regions
        ]
    length = len(moving.backward)
    forward: list[_Piece] = []
    backward: list[_Piece] = []
    for k, region in enumerate(regions):
        ahead = regions[k - 1].first if k else 0
        forward += [
            (ahead, region.last + 1, region.bytes),
            (region.first, region.last + 1, region.taken),
        ]
        if not region.late:  # a fused head has its gradients already
            continue
        if plan.reshard_after_forward != "never" and region.first < final:
            more = k + 1 < len(regions) and regions[k + 1].first < final
            behind = regions[k + 1].last + 1 if more else length
            backward += [
                (region.first, behind, region.bytes),
                (region.first, region.last + 1, region.taken),
            ]
        else:
            forward.append((region.last + 1, length, region.bytes))
            backward.append((region.first, length, region.bytes))
    _add(moving.forward, forward)
    _add(moving.backward, backward)


def _collect(moving: BytesInFlight, plan: Plan, regions: Sequence[_Region]) -> None:
    """Hold a group's gradients from the first of them until the next group is sent, then its
    shard."""
    length = len(moving.ready)
    backward: list[_Piece] = []
    ready: list[_Piece] = []
    for k, region in enumerate(regions):
        sent = regions[k - 1].first if k else 0
        backward.append((sent, region.last + 1, region.trained))
        until = region.first + 1 if plan.microbatches == 1 else length
        ready.append((0, until, region.trained // plan.shards))
    _add(moving.backward, backward)
    _add(moving.ready, ready)
