"""Which orders of the mesh axes there are to choose from, and how a pinned one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphaccel.errors import BadPin
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.axis_order import AXES, PARTS
from graphaccel.planner.plan.plan import Plan

DATA_OUTSIDE = ("data", "pipeline", "expert", "context", "tensor")
"""Neighbours of a pipeline are nearer than those of data."""


def orders(cluster: Cluster, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The orders that are offered for a plan's mesh, its own first.

    Pipeline or data is outermost, and crosses nodes; where the axes inside both fill a node, both
    do, and there is nothing to choose. The others stay inside: their collectives stand in the
    graph, where nothing hides them.
    """
    several = plan.data > 1 and plan.pipeline > 1
    room = max((link.size for link in cluster.links if link.size < cluster.count), default=1)
    if "order" in plan.pinned or not several or plan.model_parallel_size >= room:
        return (plan.order,)
    return (plan.order, DATA_OUTSIDE)


def usual_inside(plan: Plan) -> bool:
    """Whether the axes that shard the graph are the innermost, in their usual order: how far apart
    their devices are does then not depend on the others."""
    return plan.order[2:] == AXES[2:]


def read_order(said: object, sizes: Mapping[str, int | None]) -> tuple[str, ...]:
    """A pinned order with every axis: those that it leaves out have one device, so that it does not
    matter where they stand; they are put before the axis that usually follows them.

    sizes: axis → devices that are pinned. Raises BadPin (GA202).
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
    found, place = list(said), len(said)
    for axis in reversed(AXES):
        if axis in said:
            place = found.index(axis)
        elif (sizes[axis] or 1) > 1:
            raise refused(f"{axis}={sizes[axis]} has no place in it")
        else:
            found.insert(place, axis)
    return tuple(found)
