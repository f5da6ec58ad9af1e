"""How far a prediction is to be trusted: whether memory is enough, and where rates are from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphaccel.messages import format_bytes
from graphaccel.planner.cluster import Cluster, device_names
from graphaccel.planner.cluster import cluster as named_cluster
from graphaccel.planner.plan import StageMemory


@dataclass(frozen=True)
class Room:
    """Whether tensors fit the fullest device. verdict: that of `Cluster.verdict`: "safe", "likely",
    "risky" or "impossible". reason: what of its allocator it takes, in words."""

    verdict: str
    reason: str


@dataclass(frozen=True)
class Calibration:
    """Where the rates of times are from. level: 0 rates as they were given, of the catalogue or of
    a file; 1 measured (`graphaccel calibrate`). source: in words. calls: measured ones."""

    level: int
    source: str
    calls: int = 0


def room(tensors: int, cluster: Cluster) -> Room:
    """Of so many bytes of tensors on one device."""
    verdict = cluster.verdict(tensors)
    whole, half = cluster.fragmentation, cluster.fragmentation / 2
    free = max(0, cluster.device.memory - cluster.context_bytes)
    over = format_bytes(max(0, tensors - cluster.device.memory))
    reasons = {
        "safe": f"also where the allocator wastes {whole:.0%}",
        "likely": f"where the allocator wastes {half:.1%} or less, not {whole:.0%}",
        "risky": f"tensors alone take {format_bytes(tensors)}, the context leaves "
        f"{format_bytes(free)}",
        "impossible": f"tensors alone are {over} more than the device has",
    }
    return Room(verdict, reasons[verdict])


def room_of(memory: Sequence[StageMemory], cluster: Cluster) -> Room | None:
    """Of the fullest device; None where memory was not predicted."""
    return room(max(m.tensors for m in memory), cluster) if memory else None


def calibration_of(cluster: Cluster) -> Calibration:
    """By what is known of the cluster."""
    calls = len(cluster.device.measured)
    if calls:
        return Calibration(1, f"{calls} calls measured on this kind", calls)
    name = cluster.device.name
    if name in device_names():
        known = named_cluster(name, cluster.count)
        same = replace(cluster.device, memory=known.device.memory) == known.device
        if same and cluster.links == known.links:
            return Calibration(0, "catalogue figures, not measured")
    return Calibration(0, "figures given for the cluster, not measured here")
