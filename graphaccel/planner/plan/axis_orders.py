"""Candidate orders of the mesh axes, and how a pinned order is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphaccel.errors import BadPin
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.axis_order import AXES, PARTS
from graphaccel.planner.plan.plan import Plan

DATA_OUTSIDE = ("data", "pipeline", "expert", "context", "tensor")
"""The order in which pipeline neighbours are nearer to each other than data neighbours."""


def orders(cluster: Cluster, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The candidate orders for a plan's mesh, its own first.

    Either pipeline or data is the outermost axis and crosses nodes. Where the axes inside both fill
    a node, both cross nodes and there is nothing to choose. The other axes stay innermost: their
    collectives are in the graph, where no computation hides them.
    """
    several = plan.data > 1 and plan.pipeline > 1
    room = max((link.size for link in cluster.links if link.size < cluster.count), default=1)
    if "order" in plan.pinned or not several or plan.model_parallel_size >= room:
        return (plan.order,)
    return (plan.order, DATA_OUTSIDE)


def usual_inside(plan: Plan) -> bool:
    """Whether the axes that shard the graph are innermost and in their usual order; the stride of
    their devices then does not depend on the other axes."""
    return plan.order[2:] == AXES[2:]


def read_order(said: object, sizes: Mapping[str, int | None]) -> tuple[str, ...]:
    """A pinned order, completed to all axes. An axis that it leaves out has one device, so its
    position does not matter; it is inserted before the axis that usually follows it.

    sizes: axis → number of devices if pinned, else None. Raises BadPin (GA202).
    """

    def refused(reason: str) -> BadPin:
        return BadPin(pin="order", value=said, reason=reason, allowed=(",".join(AXES),))

    if isinstance(said, str) or not isinstance(said, Sequence):
        raise refused("it is a list of axes, the outermost first")
    for axis in said:
        if axis in PARTS:
            raise refused(f"{axis} is a part of data, and the parts of data stay together")
        if axis not in AXES:
            raise refused(f"{axis} is no axis of the mesh")
        if list(said).count(axis) > 1:
            raise refused(f"{axis} is there twice")
    result, place = list(said), len(said)
    for axis in reversed(AXES):
        if axis in said:
            place = result.index(axis)
        elif (sizes[axis] or 1) > 1:
            raise refused(f"{axis}={sizes[axis]} has no place in it")
        else:
            result.insert(place, axis)
    return tuple(result)
