"""Parameters that rest on the host: what of them lies on the device, and the seconds of copying.

They are copied up a block at a time, one block ahead of use, and let go of after it, in the forward
and again in the backward (Rajbhandari et al., ZeRO-Infinity, 2021, §5.1.1 and 5.2). What is read
outside of blocks is copied alone. Under ZeRO 3 it is the shard that is copied up: it lies there
until it is gathered, a block ahead too, and what is gathered comes and goes as without
(`planner.motion`). Bytes are those that rest: casts are made on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphaccel.capture.blocks import block_of
from graphaccel.ir.program import Value
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.communication import exposed_seconds
from graphaccel.planner.plan import Plan
from graphaccel.planner.profile import Profile
from graphaccel.planner.rows import Rows
from graphaccel.planner.works import StageWork


@dataclass(frozen=True)
class _Use:
    """One read of a parameter: the place where it has to be there, and the last at which it still
    is, positions or rows. block: that reads it, "" outside of blocks. bytes: of the parameter."""

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


def _stretches(uses: Iterable[_Use]) -> list[_Stretch]:
    """Uses by the run of them that one block has, and outside blocks by parameter; in the order in
    which they start. A parameter that several read is copied for each."""
    found: dict[object, list[_Use]] = defaultdict(list)
    number, before = 0, None
    for use in sorted(uses, key=lambda use: use.place):
        number, before = number + (use.block != before), use.block
        found[number if use.block else (number, use.name)].append(use)
    made = [
        _Stretch(
            own[0].place,
            max(use.last for use in own),
            sum({use.name: use.bytes for use in own}.values()),
        )
        for own in found.values()
    ]
    return sorted(made, key=lambda one: (one.first, one.last))


def _there(stretches: Sequence[_Stretch], length: int) -> np.ndarray:
    """Bytes at each place: each from where the one before it starts, up to its own end."""
    found = np.zeros(length, dtype=np.int64)
    for k, one in enumerate(stretches):
        found[stretches[k - 1].first if k else 0 : one.last + 1] += one.bytes
    return found


def _read(profile: Profile, span: tuple[int, int]) -> list[_Use]:
    """The reads of a stage of positions [first, end), counted from its first."""
    first, end = span
    names = profile.block_names
    return [
        _Use(at - first, at - first, names[block] if block >= 0 else "", p.name, p.bytes)
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


def uploaded_rows(rows: Rows, values: Sequence[Value]) -> np.ndarray:
    """Bytes of parameters from the host at each row of a program's graph. values: its inputs.

    A parameter is there until the last call that reads it, or a view of it, in its block; a shard
    until what it is sent for has arrived.
    """
    inputs = dict(zip(rows.inputs.tolist(), values, strict=True))
    held = [row for row, value in inputs.items() if value.kind in ("parameter", "shards")]
    shown = np.arange(len(rows))  # the row whose memory a row's first tensor shows
    some = rows.many > 0
    shown[some] = rows.made[rows.root[rows.first[some]]]
    pairs = np.flatnonzero(np.isin(shown[rows.source], held))
    uses = []
    for reader, source in zip(
        rows.reader[pairs].tolist(), shown[rows.source[pairs]].tolist(), strict=True
    ):
        tensor = rows.nodes[int(rows.of[source])].meta["val"]
        size, value = tensor.numel() * tensor.element_size(), inputs[source]
        last = max(reader, int(rows.waited[reader]))
        if value.kind == "shards":  # sent for one block, where another one computes
            uses.append(_Use(reader, last, "", (source, reader), size))
        else:
            uses.append(_Use(reader, last, block_of(rows.module(reader)), source, size))
    return _there(_stretches(uses), len(rows))


def with_uploads(
    profile: Profile,
    plan: Plan,
    beside: Sequence[StageWork],
    works: Sequence[StageWork],
    cluster: Cluster,
) -> tuple[StageWork, ...]:
    """The stages' work with the copies of parameters in each forward and each backward, as far as
    nothing hides them: that of the largest block, at least, as of what ZeRO 3 gathers
    (`planner.estimate`).

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
