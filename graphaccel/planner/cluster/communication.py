"""How long collectives and messages take: latency plus bandwidth over the levels of links.

A group is ``group_size`` devices with a ``stride``, aligned to the levels: device 0, stride, 2 *
stride, ... A level that holds ``size`` devices holds ``size // stride`` members of it, so the group
falls into nested subgroups; ``f`` is how many of the subgroups one level below meet on a level and
``c`` how many members each of those has. Of groups that neither divide a level evenly nor are a
multiple of it, some cross its borders (of groups of 3 in nodes of 8 the third has 2 and 1), and the
slowest decides: only as many devices as divide both are assumed to share a level. A group over axes
that are not adjacent (``further``) is such a group repeated at a larger stride: a level holds as
many times more of its members. With S bytes, latency a and bandwidth B of a level:

* Bandwidth. A ring moves S * (n - 1) / n bytes past every device, once for reduce_scatter and
  all_gather, twice for all_reduce. Where it leaves a subgroup, the c members share them, each
  having a port of its own: ``passes * S * (n - 1) / n / c / B``. Bytes travel in chunks, so the
  levels work at the same time and the slowest decides.
* Latency of a ring: one hop for each of its n - 1 steps and passes, slow hops only where it leaves
  a subgroup. It grows with n.
* Latency of a tree (all_reduce only): f - 1 hops along a chain on the innermost level, log2(f)
  above it, up and down. Its bandwidth is 0.92 of the ring's, and the factor (n - 1) / n is lost.

The faster of ring and tree is used, as NCCL does; the tree wins where many nodes exchange little.
gloo has the ring only. Every operation starts with one launch.

Where a collective was measured on a level (`Link.measured`), a and B are the measured ones: gloo's
reduce_scatter takes longer than its all_reduce, not half as long.

What overlaps with compute is not free (`exposed_seconds`). NCCL's kernels occupy processors, up to
24 of the 132 of an H100, and memory: training Llama and GPT models on A100 and H100, what computed
beside collectives took 18.9 % longer on average (Lee et al., "Characterizing Compute-Communication
Overlap in GPU-Accelerated Distributed Deep Learning", arXiv 2507.03114, 2025; 24 / 132 = 18.2 %).
Only collectives over data overlap with compute; those of the tensor, context and expert axes are in
the graph, where the ops after them read their results, and are waited for. Copies from the host use
copy engines of their own. A CPU's processes compute and send with the same cores: nothing overlaps.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 2005 (alpha-beta costs of ring and pairwise exchange); NCCL ``src/graph/tuning.cc``
(steps inside and between nodes, choice by predicted time, the factor 0.92); Sanders, Speck, Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009 (two trees together use
both directions of every port). In-switch reduction (NVLS, SHARP) is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import cast

from graphaccel.planner.cluster.cluster import Cluster, Device, Link

Further = tuple[tuple[int, int], ...]
"""(repeats, stride): the group is repeated, as in `planner.plan.axis_order.group_of`."""
_TREE_BANDWIDTH = 0.92
_SLOWED = 0.189  # share by which compute takes longer while a collective overlaps with it
INTERFERENCE = _SLOWED / (1 + _SLOWED)
"""Seconds by which a phase takes longer for each second of collectives that it hides."""


@dataclass(frozen=True)
class _Level:
    """``factor`` subgroups of ``inside`` members each meet over ``link``; ``ring_hops`` hops of a
    ring around the group cross it."""

    link: Link
    factor: int
    inside: int
    ring_hops: int


def all_reduce_seconds(
    cluster: Cluster, size: float, group_size: int, stride: int = 1, further: Further = ()
) -> float:
    """Seconds to sum ``size`` bytes over the group, with the result on every member.

    Raises ``ValueError``, like all functions here, for a group the cluster does not hold.
    """
    levels = _levels(cluster, group_size, stride, further)
    if not levels or size <= 0:
        return 0.0
    ring = 2 * _ring_seconds(levels, size, "all-reduce")
    if cluster.device.name == "cpu":
        return cluster.device.launch_seconds + ring
    hops = 0.0
    for level in levels:
        steps = level.factor - 1 if level.link is cluster.links[0] else _log2(level.factor)
        hops += steps * level.link.latency_seconds
    slowest = max(size / level.inside / level.link.bandwidth for level in levels)
    tree = 2 * hops + 2 * slowest / _TREE_BANDWIDTH
    return cluster.device.launch_seconds + min(ring, tree)


def reduce_scatter_seconds(
    cluster: Cluster, size: float, group_size: int, stride: int = 1, further: Further = ()
) -> float:
    """Seconds to sum ``size`` bytes over the group, where each member keeps its shard."""
    levels = _levels(cluster, group_size, stride, further)
    if not levels or size <= 0:
        return 0.0
    return cluster.device.launch_seconds + _ring_seconds(levels, size, "reduce-scatter")


def all_gather_seconds(
    cluster: Cluster, size: float, group_size: int, stride: int = 1, further: Further = ()
) -> float:
    """Seconds until every member has all ``size`` bytes, of which each contributes its shard."""
    levels = _levels(cluster, group_size, stride, further)
    if not levels or size <= 0:
        return 0.0
    return cluster.device.launch_seconds + _ring_seconds(levels, size, "all-gather")


def all_to_all_seconds(
    cluster: Cluster, size: float, group_size: int, stride: int = 1, further: Further = ()
) -> float:
    """Seconds to exchange ``size`` bytes per member, an equal part for every member.

    Pairwise exchange: n - 1 messages each, to as many members as each level reaches; levels work at
    the same time.
    """
    levels = _levels(cluster, group_size, stride, further)
    if not levels or size <= 0:
        return 0.0
    latency = slowest = 0.0
    for level in levels:
        partners = min(level.inside * level.factor, group_size) - level.inside
        hop, rate = level.link.rates("all-to-all")
        latency += partners * hop
        slowest = max(slowest, size * partners / group_size / rate)
    return cluster.device.launch_seconds + latency + slowest


def send_seconds(cluster: Cluster, size: float, source: int, destination: int) -> float:
    """Seconds for a message of ``size`` bytes between two devices, by their numbers."""
    if source == destination or size <= 0:
        return 0.0
    link = link_between(cluster, source, destination)
    return cluster.device.launch_seconds + link.latency_seconds + size / link.bandwidth


def exposed_seconds(
    device: Device, moved: float, piece: float, beside: float, interference: float = INTERFERENCE
) -> float:
    """Seconds by which a phase with `beside` seconds of compute takes longer for `moved` seconds of
    collectives that overlap with it in pieces. piece: seconds of the piece that is needed first, or
    ready last.

    Either all but that piece is hidden, and slows down the compute that hides it; or the phase is
    too short to hide the collectives and ends with them: all of `moved` is exposed, except for the
    share that waits for the first piece. The result grows with `moved`, and is at least
    max(interference x moved, moved - beside). interference: see `INTERFERENCE`.
    """
    if moved <= 0:
        return 0.0
    if device.type == "cpu":
        return moved
    hidden = piece + interference * (moved - piece)
    return max(hidden, moved - (1 - piece / moved) * beside)


def link_between(cluster: Cluster, source: int, destination: int) -> Link:
    """The link of the innermost level that holds both devices, by their numbers."""
    for device in (source, destination):
        if not 0 <= device < cluster.count:
            raise ValueError(f"device {device} is not among the {cluster.count} of the cluster")
    return next(link for link in cluster.links if source // link.size == destination // link.size)


def _ring_seconds(levels: list[_Level], size: float, collective: str) -> float:
    """Seconds of one pass around the ring."""
    group_size = 1 + sum(level.ring_hops for level in levels)
    passing = size * (group_size - 1) / group_size
    rates = [level.link.rates(collective) for level in levels]
    latency = sum(level.ring_hops * hop for level, (hop, _) in zip(levels, rates, strict=True))
    slowest = max(passing / x.inside / rate for x, (_, rate) in zip(levels, rates, strict=True))
    return latency + slowest


def _levels(cluster: Cluster, group_size: int, stride: int, further: Further = ()) -> list[_Level]:
    """The levels on which members of the group meet, innermost first; none for a single member."""
    group = group_size, stride, further
    if group not in cluster.known:
        cluster.known[group] = _detected_levels(cluster, *group)
    return cast("list[_Level]", cluster.known[group])


def _detected_levels(
    cluster: Cluster, group_size: int, stride: int, further: Further
) -> list[_Level]:
    runs = (group_size, stride), *further
    last = sum((many - 1) * apart for many, apart in runs)
    if any(many < 1 or apart < 1 for many, apart in runs) or last >= cluster.count:
        said = " and again ".join(f"{many} devices {apart} apart" for many, apart in runs)
        raise ValueError(f"a group of {said} does not fit {cluster.count} devices")
    levels: list[_Level] = []
    group_size, inside = prod(many for many, _ in runs), 1
    for link in cluster.links:
        members = group_size
        if link is not cluster.links[-1]:
            members = prod(max(1, gcd(link.size, many * apart) // apart) for many, apart in runs)
        if members > inside:
            below, above = -(-group_size // inside), -(-group_size // members)
            levels.append(_Level(link, -(-members // inside), inside, below - above))
            inside = members
    return levels


def _log2(count: int) -> int:
    """Levels of a binary tree over ``count`` subgroups."""
    return (count - 1).bit_length()
