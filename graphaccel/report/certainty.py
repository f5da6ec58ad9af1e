"""How reliable a prediction is: whether memory suffices, and where the rates come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.catalogue import RESERVED, device_names
from graphaccel.planner.cluster.catalogue import cluster as named_cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Precision
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.planner.profile.rate_correction import scales


@dataclass(frozen=True)
class Room:
    """Whether tensors fit the fullest device. verdict: that of `Cluster.verdict`: "safe", "likely",
    "risky" or "impossible". reason: what it assumes about the allocator, in words."""

    verdict: str
    reason: str


@dataclass(frozen=True)
class Reserve:
    """Memory that the allocator is assumed to reserve beyond tensors, as a share of them. quantile:
    in this share of the observed runs it was less; None where it is given with the cluster, or
    assumed. source: in words."""

    share: float
    quantile: float | None
    source: str


@dataclass(frozen=True)
class Calibration:
    """Where the rates of times come from. level: 0 given rates, of the catalogue or of a file; 1
    measured (`graphaccel calibrate`); 2 also corrected by a measured step of the model
    (`--refine`). source: in words. calls: number of measured ones; steps: number of steps run.
    error: expected relative error of a step's time; None where nothing was compared. error_of: the
    comparison that it is the mean of."""

    level: int
    source: str
    calls: int = 0
    steps: int = 0
    error: float | None = None
    error_of: str = ""


# Mean errors of a step's time over the results committed in benchmarks/results:
# tests/report/test_certainty.py recomputes them.
_LEFT_OUT = {False: 0.07, True: 0.1}
"""validation.json: published runs on GPUs, each source predicted by constants that are fitted
without it, mean over the sources. True: plans with 8-bit matmuls included."""
_COMPARED = ("a100", "b200", "h100", "h200")
"""Device kinds with such runs; H200 has the constants of H100."""
_CALIBRATED = 0.07
"""predicted.json: 18 plans of three small models after `graphaccel calibrate`, on CPU processes."""
_REFINED = 0.05
"""predicted.json: each of those plans, scaled by the ratio of another plan of its model on the same
number of processes."""


def reserve_of(cluster: Cluster) -> Reserve:
    """The reserve of the allocator of a cluster's devices."""
    share = cluster.fragmentation
    if cluster.device.type == "cuda" and share == RESERVED:
        return Reserve(share, 0.9, "of 27 published runs on B200")
    if cluster.device.type == "cpu":
        return Reserve(share, None, "assumed of the C library, not measured")
    return Reserve(share, None, "given with the cluster")


def reserve_text(reserve: Reserve) -> str:
    """The part of `other` beside the context, in words."""
    if reserve.quantile is None:
        return f"{reserve.share:.0%} fragmentation ({reserve.source})"
    return f"{reserve.share:.0%} fragmentation (quantile {reserve.quantile:g} {reserve.source})"


def room(tensors: int, cluster: Cluster) -> Room:
    """Whether this many bytes of tensors fit one device."""
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
    """Whether tensors fit the fullest device; None where memory was not predicted."""
    return room(max(m.tensors for m in memory), cluster) if memory else None


def calibration_of(cluster: Cluster, precision: Precision | None = None) -> Calibration:
    """The calibration of a cluster, for a plan of that precision (8-bit or not)."""
    calls, steps = len(cluster.device.measured), cluster.refined_by
    known = f"{calls} calls measured on this kind" if calls else _given(cluster)
    if steps:
        known = known if calls else "figures of its file"
        by = scales(steps)
        factors = f"computing x {by.compute:.2f}, communication x {by.communication:.2f}, "
        factors += f"optimizer x {by.optimizer:.2f}"
        run = "a step that was run" if len(steps) == 1 else f"{len(steps)} steps that were run"
        return Calibration(
            2, f"{known}, corrected by {run}: {factors}", calls, len(steps), _REFINED,
            "other plans of a model of which a step was run, on CPU processes",
        )  # fmt: skip
    if calls:
        return Calibration(
            1, known, calls, error=_CALIBRATED, error_of="plans of small models on CPU processes"
        )
    compared = cluster.device.name.startswith(_COMPARED) and known == _CATALOGUE
    if not compared:
        return Calibration(0, known)
    eight = precision is not None and precision.planned_only
    return Calibration(
        0, known, error=_LEFT_OUT[eight], error_of="published runs of other systems"
    )  # fmt: skip


def error_text(calibration: Calibration) -> str:
    """The expected error, in words."""
    if calibration.error is None:
        return "error to expect: not known, no run on such a device was compared"
    if not calibration.level:
        return (
            "error to expect: not known for graphaccel's own steps; "
            f"{calibration.error:.0%} for {calibration.error_of}"
        )
    return f"error to expect: {calibration.error:.0%}, the mean over {calibration.error_of}"


_CATALOGUE = "catalogue figures, not measured"


def _given(cluster: Cluster) -> str:
    name, result = cluster.device.name, cluster.device.stands_for
    if result:
        return f"rates of {name} by the processors of {result}"
    if name in device_names():
        known = named_cluster(name, cluster.count)
        same = replace(cluster.device, memory=known.device.memory) == known.device
        if same and cluster.links == known.links:
            return _CATALOGUE
    return "figures given for the cluster, not measured here"
