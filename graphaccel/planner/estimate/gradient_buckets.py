"""Sizes of the buckets in which gradients are reduced, and the time of copies in and out of
them."""

from __future__ import annotations

import math

from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.profile.efficiency import Work, seconds_of

_SMALLEST = 1 << 20  # bytes: a smaller collective is all latency


def bucket_limit(bucket_bytes: int, total: int, *, scattered: bool) -> int:
    """The largest size in bytes of a bucket of a stage that has `total` bytes of gradients.

    The first bucket must be full well before the backward ends, or nothing overlaps; each further
    bucket adds its latency. scattered: the sums stay sharded (ZeRO 2 and 3), and a bucket takes
    additional memory.
    """
    return min(bucket_bytes, max(_SMALLEST, total // (4 if scattered else 2)))


def bucket_count(size: float, bucket_bytes: int, total: float, *, scattered: bool) -> int:
    """The number of buckets for `size` of the `total` bytes, if each is full."""
    return max(1, math.ceil(size / bucket_limit(bucket_bytes, int(total), scattered=scattered)))


def copy_seconds(size: float, device: Device) -> float:
    """Seconds to copy `size` bytes of gradients or parameters in or out of a bucket.

    Only where ops were measured (`graphaccel calibrate`): the catalogue's rates are fitted to full
    steps of published runs, which include such copies.
    """
    if not device.measured or size <= 0:
        return 0.0
    return seconds_of(Work(op="aten.copy_", bytes=int(2 * size)), device)
