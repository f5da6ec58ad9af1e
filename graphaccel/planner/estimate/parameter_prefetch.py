"""Parameters that rest on the host: what of them lies on the device, and the seconds of copying.

They are copied up a block at a time, one block ahead of use, and let go of after it, in the forward
and again in the backward (`passes.upload_parameters`; Rajbhandari et al., ZeRO-Infinity, 2021,
§5.1.1 and 5.2). What is read outside of blocks is copied alone. Under ZeRO 3 it is the shard that
is copied up: it lies there until it is gathered, a block ahead too, and what is gathered comes and
goes as without (`planner.estimate.zero_memory`). Bytes are those that rest: casts are made on the
device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import exposed_seconds
from graphaccel.planner.estimate.stage_costs import StageWork
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True)
class Use:
    """One read of a parameter: the place where it has to be there, and the last at which it still
    is. block: that reads it, "" outside of blocks. bytes: of the parameter."""

    place: int
    last: int
    block: str
    name: object
    bytes: int


@dataclass(frozen=True)
class _Stretch:
    """What is copied up at once: for which places, and its bytes."""

    first: int
    last: int
    bytes: int


def runs_of(uses: Iterable[Use]) -> list[list[Use]]:
    """Uses by what is copied up at once: the run of them that one block has, and outside of blocks
    each parameter; in the order in which they start, as their own uses are. A parameter that
    several read is copied for each."""
    found: dict[object, list[Use]] = defaultdict(list)
    number, before = 0, None
    for use in sorted(uses, key=lambda use: use.place):
        number, before = number + (use.block != before), use.block
        found[number if use.block else (number, use.name)].append(use)
    return sorted(found.values(), key=lambda own: (own[0].place, max(use.last for use in own)))


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
    """Bytes at each place: each from where the one before it starts, up to its own end."""
    found = np.zeros(length, dtype=np.int64)
    for k, one in enumerate(stretches):
        found[stretches[k - 1].first if k else 0 : one.last + 1] += one.bytes
    return found


def _read(profile: Profile, span: tuple[int, int]) -> list[Use]:
    """The reads of a stage of positions [first, end), counted from its first."""
    first, end = span
    names = profile.block_names
    return [
        Use(at - first, at - first, names[block] if block >= 0 else "", p.name, p.bytes)
        for p in map(profile.parameters.__getitem__, profile.read([span]))
        if p.name in profile.resting
        for at, block in ((at, int(profile.block_at[at])) for at in p.positions)
        if first <= at < end
    ]


def _shards(stretches: Sequence[_Stretch], ranks: int) -> list[_Stretch]:
    """The shards of what is gathered: each from where it is sent to where it has arrived, before
    its first use."""
    sent = [0, *(one.first for one in stretches)]
    return [
        _Stretch(start, max(start, one.first - 1), one.bytes // ranks)
        for start, one in zip(sent, stretches, strict=False)
    ]


def uploaded(profile: Profile, plan: Plan, span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of parameters from the host at each position of a stage, in forward and backward."""

    def found() -> tuple[np.ndarray, np.ndarray]:
        length = span[1] - span[0]
        uses = _read(profile, span)
        late = [replace(u, place=length - 1 - u.last, last=length - 1 - u.place) for u in uses]
        ways = [_stretches(uses), _stretches(late)]
        if plan.zero == 3:
            ways = [_shards(way, plan.shards) for way in ways]
        forward, backward = (_there(way, length) for way in ways)
        return forward, backward[::-1]

    return profile.once(("uploaded", span, plan.zero == 3, plan.shards), found)


def with_uploads(
    profile: Profile,
    plan: Plan,
    beside: Sequence[StageWork],
    works: Sequence[StageWork],
    cluster: Cluster,
) -> tuple[StageWork, ...]:
    """The stages' work with the copies of parameters in each forward and each backward, as far as
    nothing hides them: that of the largest block, at least, as of what ZeRO 3 gathers
    (`planner.estimate.data_axis`).

    beside: the work that they may hide behind; nothing on a device that is its own host.
    """
    assert cluster.host is not None
    link, alone = cluster.host.link, cluster.host.shared
    shards = plan.shards if plan.zero == 3 else 1
    found = []
    for own, work in zip(beside, works, strict=True):
        span = own.first, own.end
        sizes = profile.once(("uploads", span), lambda span=span: [
            one.bytes for one in _stretches(_read(profile, span))])  # fmt: skip
        once, first = sum(sizes) / shards / link, max(sizes, default=0) / shards / link
        ahead, back = (
            once if alone else exposed_seconds(cluster.device, once, first, s, interference=0.0)
            for s in (own.forward, own.backward)
        )
        found.append(replace(work, forward=work.forward + ahead, backward=work.backward + back))
    return tuple(found)
