"""The rates of devices and links by which placements on a mesh axis are chosen."""

from __future__ import annotations

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.efficiency import computing, peak_flops
from graphaccel.sharding.solve.conversions import Rates


def axis_rates(cluster: Cluster, plan: Plan, axis: str) -> Rates:
    """Rates of an axis of a plan's mesh on a cluster.

    The launch of an op is left out, except as a tie-break: where sharding pays it is negligible.
    Measured rates of single collectives are not used here; they count where plans are predicted.
    """
    inner = {"tensor": 1, "context": plan.tensor, "expert": plan.context * plan.tensor}[axis]
    span = inner * getattr(plan, axis)
    link = next((x for x in cluster.links if x.size % span == 0), cluster.links[-1])
    device = cluster.device
    flops = peak_flops(computing(device, plan.precision), plan.precision.compute)
    tie = 64 / link.bandwidth
    hop = link.latency_seconds + device.launch_seconds
    return Rates(flops, device.memory_bandwidth, tie, link.bandwidth, hop)
