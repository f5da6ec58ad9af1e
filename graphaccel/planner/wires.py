"""What the collectives inside a graph cost: those of the tensor, context and expert axes.

Devices are numbered pipeline, data, expert, context, tensor from the outside in, so that the
members of an axis stand as far apart as all axes inside it together hold devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphaccel.kernels.expert_rows import EXCHANGE
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
)
from graphaccel.planner.cost import Resolve, tensor_bytes
from graphaccel.planner.plan import Plan

_c10d = torch.ops._c10d_functional
_INNERMOST_FIRST = ("tensor", "context", "expert", "data")
KINDS = {
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
    """Whether what a call gives stays where its block is computed again: a message is not sent
    again, but for gathers, which would keep what all devices have."""
    return node.target in KINDS and KINDS[node.target] != "all-gather"


@dataclass(frozen=True)
class Wires:
    """The axes of a mesh on a cluster's links."""

    cluster: Cluster
    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1

    def group(self, axes: Sequence[str]) -> tuple[int, int]:
        """(devices, how far apart they are) of the group over some axes together."""
        size, stride, inside = 1, 0, 1
        for axis in _INNERMOST_FIRST:
            ranks = getattr(self, axis)
            if axis in axes and ranks > 1:
                size, stride = size * ranks, stride or inside
            inside *= ranks
        return size, stride or 1

    def all_reduce(self, size: float, axes: Sequence[str]) -> float:
        """Seconds to sum `size` bytes over some axes together; 0 where they have one device."""
        return all_reduce_seconds(self.cluster, size, *self.group(axes))

    def seconds(self, node: fx.Node, sizes: Resolve) -> float:
        """Seconds of a collective of the graph; 0 for any other node."""
        kind = KINDS.get(node.target)
        if kind is None:
            return 0.0
        return _SECONDS[kind](self.cluster, sent_bytes(node, sizes), *self._of(node))

    def _of(self, node: fx.Node) -> tuple[int, int]:
        return self.group(str(node.args[-1]).split("+"))


def sent_bytes(node: fx.Node, sizes: Resolve) -> int:
    """Bytes of what a collective is about: the whole tensor, of which a rank brings or gets a part
    where it is gathered or scattered."""
    whole = node if KINDS[node.target] == "all-gather" else node.all_input_nodes[0]
    return int(tensor_bytes(whole, sizes))


def wires_of(cluster: Cluster, plan: Plan) -> Wires:
    """The wires of a plan's mesh; memory changes no price, so that it is left out."""
    return Wires(cluster.bare, plan.tensor, plan.context, plan.expert, plan.data)
