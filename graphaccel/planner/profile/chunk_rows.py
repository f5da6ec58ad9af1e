"""Chooses how many rows a chunked fused op processes at a time (`kernels.spec.Chunks`).

Each chunk reads the weight again and accumulates a gradient of the weight's size: with few rows
that takes longer than the matmuls themselves. With all rows in one chunk the full logits would be
in memory, which the op exists to avoid: that is not offered. From some size on time hardly falls:
the smallest size within `_NEAR` of the fastest is preferred. Where that does not fit, smaller ones
are tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.profile.cost import Sizes, chunks_of, node_work
from graphaccel.planner.profile.efficiency import gap_seconds, seconds_of

_LEAST = 128  # rows: below that, matmuls waste most of what they read
_NEAR = 1.05  # of the op's own seconds: a hundredth of a step of which it is a fifth


def chunk_sizes(nodes: Sequence[fx.Node], sizes: Sizes, device: Device) -> tuple[int, ...]:
    """Chunk sizes in rows that a plan may use: powers of two, the preferred one first, then all
    smaller ones; all rows if there are no more than the least. () without nodes. sizes: of a
    microbatch."""
    if not nodes:
        return ()
    most = max(chunks_of(node, sizes, 1).times for node in nodes)  # number of rows
    offered = [size for size in (_LEAST << i for i in range(32)) if size < most] or [most]
    seconds = {size: chunk_seconds(nodes, sizes, device, size) for size in offered}
    enough = _NEAR * min(seconds.values())
    best = min(size for size in offered if seconds[size] <= enough)
    return tuple(size for size in reversed(offered) if size <= best)


def chunk_seconds(nodes: Sequence[fx.Node], sizes: Sizes, device: Device, size: int) -> float:
    """Seconds of these nodes with `size` rows at a time."""
    costs = [node_work(node, sizes, size, device.type) for node in nodes]
    return sum(seconds_of(work, device) + gap_seconds(device) * work.calls for work in costs)
