"""Costs of the collectives inside a graph: those of the tensor, context and expert axes.

The stride of an axis is the number of devices that all axes inside it hold together
(`planner.plan.axis_order`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphaccel.kernels.ops.expert_rows import EXCHANGE
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
)
from graphaccel.planner.plan.axis_order import PARTS, Group, group_of, stride
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import Resolve, tensor_bytes

_c10d = torch.ops._c10d_functional
_OUTSIDE = ("pipeline", "data", *PARTS)
KINDS: Mapping[Any, str] = {
    _c10d.all_reduce.default: "all-reduce",
    _c10d.all_gather_into_tensor.default: "all-gather",
    _c10d.reduce_scatter_tensor.default: "reduce-scatter",
    _c10d.all_to_all_single.default: "all-to-all",
    EXCHANGE: "all-to-all",
}
_SECONDS = {
    "all-reduce": all_reduce_seconds,
    "all-gather": all_gather_seconds,
    "reduce-scatter": reduce_scatter_seconds,
    "all-to-all": all_to_all_seconds,
}


def is_kept(node: fx.Node) -> bool:
    """Whether the result of a call is saved where its block is recomputed: a collective is not
    repeated, except all-gathers, whose result would be saved by every device."""
    return node.target in KINDS and KINDS[node.target] != "all-gather"


@dataclass(frozen=True)
class CollectiveCosts:
    """The axes of a mesh on a cluster's links: (axis, devices, stride) of the axes with several
    devices."""

    cluster: Cluster
    axes: tuple[tuple[str, int, int], ...] = ()

    def group(self, axes: Collection[str]) -> Group:
        """The devices of the group over some axes together; one device without axes."""
        names = {*axes, *(PARTS if "data" in axes else ())}
        return group_of((size, apart) for axis, size, apart in self.axes if axis in names)

    @property
    def inside(self) -> CollectiveCosts:
        """The costs of the axes over which calls of a graph communicate."""
        return replace(self, axes=tuple(own for own in self.axes if own[0] not in _OUTSIDE))

    def all_reduce(self, size: float, axes: Collection[str]) -> float:
        """Seconds to all-reduce `size` bytes over some axes together; 0 where they have one
        device."""
        return all_reduce_seconds(self.cluster, size, *self.group(axes))

    def seconds(self, node: fx.Node, sizes: Resolve) -> float:
        """Seconds of a collective of the graph; 0 for any other node."""
        kind = KINDS.get(node.target)
        if kind is None:
            return 0.0
        group = self.group(str(node.args[-1]).split("+"))
        return _SECONDS[kind](self.cluster, sent_bytes(node, sizes), *group)


def sent_bytes(node: fx.Node, sizes: Resolve) -> int:
    """Bytes of the full tensor of a collective, of which a rank contributes or receives a shard
    where it is gathered or scattered."""
    whole = node if KINDS[node.target] == "all-gather" else node.all_input_nodes[0]
    return int(tensor_bytes(whole, sizes))


def collective_costs_of(cluster: Cluster, plan: Plan) -> CollectiveCosts:
    """The costs of collectives on a plan's mesh; device memory is left out, because it changes no
    time."""
    sizes = plan.sizes
    own = [(axis, size, stride(sizes, axis)) for axis, size in sizes.items() if size > 1]
    return CollectiveCosts(cluster.bare, tuple(sorted(own)))
