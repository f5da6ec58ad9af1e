"""Padding of dims that the ranks do not divide: track where it is zero, and mask it where needed.

A dim of 50257 on 2 ranks is 25129 on each; the last position of the last rank is padding. Most ops
compute something there that nothing reads. Two kinds do read it: a sum over the dim (a matmul, a
sum), for which it must be zero, and a softmax, for which it must be -inf. Sharded parameters have
zeros there, and gradients of parameters are returned with zeros, so that an optimizer leaves them
at zero. Zeros are propagated through the ops that preserve them; what is not known to be zero is
masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphaccel.sharding.apply.graph_builder import Emitter
from graphaccel.sharding.rules.batch_placement import PARTIAL
from graphaccel.sharding.rules.shard import Row, Shard

aten = torch.ops.aten
_MOVES = frozenset(
    {
        aten.t.default, aten.transpose.int, aten.permute.default, aten.clone.default,
        aten._to_copy.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
        aten.unsqueeze.default, aten.squeeze.dim, aten.sum.dim_IntList,
    }
)  # fmt: skip
# The result is zero where all operands are; none of these divides by an operand.
_KEEPS = frozenset(
    {
        aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.sub.Tensor, aten.neg.default,
        aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default,
        aten.gelu_backward.default, aten.silu_backward.default, aten.tanh_backward.default,
        aten.threshold_backward.default,
    }
)  # fmt: skip
_LOWERED = frozenset({"embedding_backward"})


class Padding:
    """Tracks which local values of one graph are zero in their padding."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self._zero: set[fx.Node] = set()

    def add_zero(self, node: fx.Node) -> None:
        """Record a parameter, or a slice of a full tensor: padded with zeros."""
        self._zero.add(node)

    def zero(self, node: fx.Node, shard: Shard) -> fx.Node:
        """The value with its padding set to zero."""
        if not shard.padding or node in self._zero:
            return node
        built = self.emit.masked(node, shard, 0.0)
        self._zero.add(built)
        return built

    def before(self, node: fx.Node, row: Row, local: list[fx.Node]) -> list[fx.Node]:
        """The local operands of a call, masked where the call reads their padding."""
        padded = _padded(row)
        if not padded:
            return local
        built = list(local)
        if row.lowering == "softmax" and len(local) == 1:
            built[0] = self.emit.masked(local[0], padded[0], float("-inf"))
        elif row.lowering == "softmax":
            built[0] = self.zero(local[0], padded[0])
        elif not row.lowering and PARTIAL in row.outputs:
            for position, shard in padded.items():
                built[position] = self.zero(local[position], shard)
        return built

    def after(
        self, node: fx.Node, row: Row, local: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> None:
        """Record the results of a call that are known to be zero in their padding."""
        (place, *others) = row.outputs or (None,)
        if others or not isinstance(place, Shard) or not place.padding:
            return
        if row.lowering:
            kept = row.lowering in _LOWERED or _is_zero(node, row)
        elif node.target in (aten.mm.default, aten.addmm.default):
            kept = all(local[i] in self._zero for i in _padded(row))
        elif node.target in _MOVES:
            kept = local[0] in self._zero
        elif node.target is aten.div.Tensor:
            kept = local[0] in self._zero and set(_padded(row)) == {0}
        elif node.target in _KEEPS:
            sums = node.target in (aten.add.Tensor, aten.sub.Tensor)
            every = len(_padded(row)) == len(local) or not sums
            numbers = sums and len(local) == 1  # x + 1
            kept = every and not numbers and all(local[i] in self._zero for i in _padded(row))
        else:
            kept = False
        if kept:
            self._zero.update(results)


def _padded(row: Row) -> dict[int, Shard]:
    """Positions of operands whose shards have padding."""
    return {i: p for i, p in enumerate(row.inputs) if isinstance(p, Shard) and p.padding}


def _is_zero(node: fx.Node, row: Row) -> bool:
    """Whether the padding of a result is zero: a softmax, its backward, or picking a label."""
    if row.lowering not in ("softmax", "nll_loss"):
        return False
    return node.target is aten._softmax.default or "backward" in str(node.target)
