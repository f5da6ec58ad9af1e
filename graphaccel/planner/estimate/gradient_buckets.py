"""The buckets in which gradients travel, and what lies around them: one rule for all who count."""

from __future__ import annotations

import math

from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.profile.efficiency import Work, seconds_of

_SMALLEST = 1 << 20  # bytes: below this a collective is all latency


def bucket_limit(bucket_bytes: int, total: int, *, scattered: bool) -> int:
    """Bytes at most of a bucket of a stage that has `total` bytes of gradients.

    The first must be complete well before the backward is, or nothing overlaps; each more has its
    latency. scattered: the sums stay in shards (ZeRO 2 and 3), and a bucket is memory more.
    """
    return min(bucket_bytes, max(_SMALLEST, total // (4 if scattered else 2)))


def bucket_count(size: float, bucket_bytes: int, total: float, *, scattered: bool) -> int:
    """Buckets of `size` of the `total` bytes, where every one is full."""
    return max(1, math.ceil(size / bucket_limit(bucket_bytes, int(total), scattered=scattered)))


def copy_seconds(size: float, device: Device) -> float:
    """Seconds to copy `size` bytes of gradients or parameters in or out of a bucket.

    Only where ops were measured (`graphaccel calibrate`): the catalogue's rates are of whole steps
    of published runs, in which such copies are.
    """
    if not device.measured or size <= 0:
        return 0.0
    return seconds_of(Work(op="aten.copy_", bytes=int(2 * size)), device)
