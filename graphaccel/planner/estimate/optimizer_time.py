"""Seconds of the optimizer's step, on the device or on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphaccel.planner.cluster.cluster import Cluster, Device, OpTime
from graphaccel.planner.estimate.stage_costs import StageCost
from graphaccel.planner.estimate.zero_shards import kept_bytes
from graphaccel.planner.plan.offload import host_step_seconds
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import OPTIMIZER
from graphaccel.planner.profile.profile import Profile

# A step of AdamW is about ten elementwise operations for each tensor; on a GPU they run on a
# hundred tensors at once.
_OPTIMIZER_OPS = 10
_TENSORS_AT_ONCE = 100


def stepped(profile: Profile, plan: Plan, costs: Sequence[StageCost]) -> tuple[float, int]:
    """(bytes of gradients that a rank's optimizer steps, number of their tensors)."""
    trained, tensors = sum(w.gradient for w in costs), sum(w.tensors for w in costs)
    if not plan.zero:
        return trained, tensors
    kept = kept_bytes(profile, plan, [(w.first, w.end) for w in costs]).trained
    return kept + (trained - kept) / plan.shards, tensors


def step_seconds(
    gradient: float, tensors: int, cluster: Cluster, optimizer_bytes: int, offload: Sequence[str]
) -> tuple[float, float]:
    """(seconds of the optimizer's step, seconds of copies to and from the host around it)."""
    seconds = _optimizer_seconds(gradient, tensors, cluster, optimizer_bytes)
    if "optimizer" not in offload:
        return seconds, 0.0
    return host_step_seconds(gradient, tensors, optimizer_bytes, cluster, seconds, offload)


def _optimizer_seconds(
    gradient: float, tensors: int, cluster: Cluster, optimizer_bytes: int
) -> float:
    launches = tensors if cluster.device.name == "cpu" else math.ceil(tensors / _TENSORS_AT_ONCE)
    return _steps(gradient, tensors, launches, cluster.device, optimizer_bytes)


def _steps(
    gradient: float, tensors: float, launches: float, device: Device, optimizer_bytes: int
) -> float:
    """Read parameter, gradient and state, write parameter and state, at memory bandwidth; or by the
    measured rate.

    gradient: bytes of gradients, in `tensors` tensors. launches: times that each operation is
    started."""
    for row in device.measured:
        if row.op == OPTIMIZER:
            starts, moves = _measured(row, device)
            return device.stepping * (starts * tensors + moves * gradient)
    traffic = gradient * (3 + 2 * optimizer_bytes / 4)
    seconds = traffic / device.memory_bandwidth + launches * _OPTIMIZER_OPS * device.launch_seconds
    return device.stepping * seconds


def _measured(row: OpTime, device: Device) -> tuple[float, float]:
    """(seconds for each tensor, for each byte) of a measured step: a shard has fewer numbers, but
    as many tensors."""
    starts = min(row.seconds / row.count, _OPTIMIZER_OPS * device.launch_seconds)
    return starts, (row.seconds - row.count * starts) / max(1, row.bytes)


def least_optimizer(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int, extra: int = 1
) -> float:
    """Lower bound on the seconds of the optimizer, with copies to and from the host, where every
    stage has an equal part. extra: as in `planner.search.data_axis_bounds.least_moved`."""
    size = profile.trained_bytes / extra / (plan.shards if plan.zero else 1)
    tensors = profile.trained_tensors
    launches = tensors / (1 if cluster.device.name == "cpu" else _TENSORS_AT_ONCE)
    seconds = _steps(size, tensors, launches, cluster.device, optimizer_bytes)
    if "optimizer" in plan.offload:
        seconds = sum(
            host_step_seconds(size, tensors, optimizer_bytes, cluster, seconds, plan.offload)
        )
    return seconds / plan.pipeline
