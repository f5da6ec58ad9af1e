"""Offloaded parameters: their bytes on the device by position, and exposed seconds of prefetch.

They are copied to the device a block at a time, one block ahead of use, and freed after it, in the
forward and again in the backward (`passes.parameters.upload_parameters`; Rajbhandari et al.,
ZeRO-Infinity, 2021, §5.1.1 and 5.2). Parameters that are read outside of blocks are copied alone.
Under ZeRO 3 the shard is copied to the device: it is held until it is gathered, a block ahead too,
and what is gathered is held as without offload (`planner.estimate.zero_memory`). Bytes are those in
the stored dtype: casts run on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import exposed_seconds
from graphaccel.planner.estimate.stage_costs import StageCost
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True)
class Use:
    """One read of a parameter: the first position at which it must be on the device, and the last
    at which it still is. block: the block that reads it, "" outside of blocks. bytes: of the
    parameter."""

    place: int
    last: int
    block: str
    name: object
    bytes: int


@dataclass(frozen=True)
class _Stretch:
    """Parameters that are copied together: for which positions, and their bytes."""

    first: int
    last: int
    bytes: int


def runs_of(uses: Iterable[Use]) -> list[list[Use]]:
    """Uses grouped by what is copied together: the consecutive uses of one block, and outside of
    blocks each parameter; groups, and the uses inside them, in the order in which they start. A
    parameter that several groups read is copied for each."""
    results: dict[object, list[Use]] = defaultdict(list)
    number, before = 0, None
    for use in sorted(uses, key=lambda use: use.place):
        number, before = number + (use.block != before), use.block
        results[number if use.block else (number, use.name)].append(use)
    return sorted(results.values(), key=lambda own: (own[0].place, max(use.last for use in own)))


def _stretches(uses: Iterable[Use]) -> list[_Stretch]:
    return [
        _Stretch(
            own[0].place,
            max(use.last for use in own),
            sum({use.name: use.bytes for use in own}.values()),
        )
        for own in runs_of(uses)
    ]


def _there(stretches: Sequence[_Stretch], length: int) -> np.ndarray:
    """Bytes at each position: a copy is held from where the one before it starts, up to its own
    end."""
    result = np.zeros(length, dtype=np.int64)
    for k, one in enumerate(stretches):
        result[stretches[k - 1].first if k else 0 : one.last + 1] += one.bytes
    return result


def _read(profile: Profile, span: tuple[int, int]) -> list[Use]:
    """The reads of a stage of positions [first, end), counted from its first."""
    first, end = span
    names = profile.block_names
    return [
        Use(at - first, at - first, names[block] if block >= 0 else "", p.name, p.bytes)
        for p in map(profile.parameters.__getitem__, profile.read([span]))
        if p.name in profile.parameter_names
        for at, block in ((at, int(profile.block_at[at])) for at in p.positions)
        if first <= at < end
    ]


def _shards(stretches: Sequence[_Stretch], ranks: int) -> list[_Stretch]:
    """The shards of what is gathered: each held from where its all-gather is issued to where it has
    arrived, before its first use."""
    sent = [0, *(one.first for one in stretches)]
    return [
        _Stretch(start, max(start, one.first - 1), one.bytes // ranks)
        for start, one in zip(sent, stretches, strict=False)
    ]


def uploaded(profile: Profile, plan: Plan, span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of prefetched parameters at each position of a stage, in forward and backward."""
    request = span, plan.zero == 3, plan.shards
    return profile.analyses.cached(request, _uploaded, profile, plan, span)


def _uploaded(profile: Profile, plan: Plan, span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    length = span[1] - span[0]
    uses = _read(profile, span)
    late = [replace(u, place=length - 1 - u.last, last=length - 1 - u.place) for u in uses]
    stretches = [_stretches(uses), _stretches(late)]
    if plan.zero == 3:
        stretches = [_shards(each, plan.shards) for each in stretches]
    forward, backward = (_there(each, length) for each in stretches)
    return forward, backward[::-1]


def _upload_sizes(profile: Profile, span: tuple[int, int]) -> list[int]:
    """Bytes of each copy of a stage."""
    return [one.bytes for one in _stretches(_read(profile, span))]


def with_uploads(
    profile: Profile,
    plan: Plan,
    beside: Sequence[StageCost],
    costs: Sequence[StageCost],
    cluster: Cluster,
) -> tuple[StageCost, ...]:
    """The costs of the stages with the exposed seconds of parameter prefetch in each forward and
    each backward: at least the copy of the largest block, as for ZeRO 3's all-gathers
    (`planner.estimate.data_axis`).

    beside: the costs of the work that can hide the copies. Nothing hides them on a device that is
    its own host.
    """
    assert cluster.host is not None
    link, alone = cluster.host.link, cluster.host.shared
    shards = plan.shards if plan.zero == 3 else 1
    results = []
    for own, work in zip(beside, costs, strict=True):
        span = own.first, own.end
        sizes = profile.analyses.cached(span, _upload_sizes, profile, span)
        once, first = sum(sizes) / shards / link, max(sizes, default=0) / shards / link
        ahead, back = (
            once if alone else exposed_seconds(cluster.device, once, first, s, interference=0.0)
            for s in (own.forward, own.backward)
        )
        results.append(replace(work, forward=work.forward + ahead, backward=work.backward + back))
    return tuple(results)
