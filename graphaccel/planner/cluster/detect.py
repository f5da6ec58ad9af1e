"""Builds a cluster from detected GPUs: the nearest entry of the catalogue, scaled by processors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster

# CUDA's compute capability of each entry (CUDA C++ programming guide, "Compute capabilities").
_CAPABILITIES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "v100-16gb": (7, 0),
        "v100-32gb": (7, 0),
        "t4-16gb": (7, 5),
        "a100-40gb": (8, 0),
        "a100-80gb": (8, 0),
        "rtx3090-24gb": (8, 6),
        "a6000-48gb": (8, 6),
        "rtx4090-24gb": (8, 9),
        "l4-24gb": (8, 9),
        "l40s-48gb": (8, 9),
        "h100-80gb": (9, 0),
        "h200-141gb": (9, 0),
        "b200-192gb": (10, 0),
        "gb200-192gb": (10, 0),
        "b300-288gb": (10, 3),
        "gb300-288gb": (10, 3),
        "rtx5090-32gb": (12, 0),
    }
)


@dataclass(frozen=True)
class DetectedDevice:
    """What a driver reports of a GPU. memory: bytes; processors: streaming multiprocessors;
    capability: CUDA's compute capability, as (major, minor)."""

    name: str
    memory: int
    processors: int
    capability: tuple[int, int]


def detected_cluster(detected_device: DetectedDevice, count: int) -> Cluster:
    """A cluster of ``count`` such GPUs with the links of the catalogue entry of that name; where
    there is none, of the nearest entry by compute capability and then by processors. Peaks and
    memory bandwidth are the entry's, scaled by the GPU's share of the entry's processors; where the
    result is not exactly a catalogue entry, the device records it (``Device.stands_for``).

    Raises what ``planner.cluster.catalogue.cluster`` raises.
    """
    words = set(re.split(r"[^a-z0-9]+", detected_device.name.lower()))
    named = [name for name in _CAPABILITIES if _word(name) in words]
    name = min(named or _CAPABILITIES, key=lambda name: _distance(name, detected_device))
    where = cluster(name, count, detected_device.memory)
    device = where.device
    share = detected_device.processors / device.processors
    if named and share == 1:
        return where
    device = replace(
        device,
        processors=detected_device.processors,
        peak_flops={dtype: share * rate for dtype, rate in device.peak_flops.items()},
        memory_bandwidth=share * device.memory_bandwidth,
        stands_for=detected_device.name,
    )
    return replace(where, device=device)


def _word(name: str) -> str:
    """The word of an entry's name by which drivers name the device: "4090" of "rtx4090-24gb"."""
    return name.partition("-")[0].removeprefix("rtx")


def _distance(name: str, detected_device: DetectedDevice) -> tuple[float, ...]:
    major, minor = _CAPABILITIES[name]
    device = cluster(name, 1).device
    return (
        abs(major - detected_device.capability[0]),
        abs(minor - detected_device.capability[1]),
        abs(device.processors - detected_device.processors),
        abs(device.memory - detected_device.memory),
    )
