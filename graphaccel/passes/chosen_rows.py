"""Rows that are a rank's own because it holds the expert they chose: zeros for all others.

Every rank has whole tensors of such rows, in which those of others hold anything. Most ops go row
by row and do not care; where rows are added up, or ranks' tensors are, the others must be zero.
"""

from __future__ import annotations

import torch
from torch import fx

from graphaccel.passes.emit import Emitter
from graphaccel.passes.lowerings import own_rows
from graphaccel.rules.shard import Shard

aten = torch.ops.aten


class ChosenRows:
    """Which local values of one graph are zero in the rows of others."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self._zero: dict[fx.Node, fx.Node] = {}

    def add_zero(self, node: fx.Node) -> None:
        """What a product with a rank's own experts gives."""
        self._zero[node] = node

    def zero(self, node: fx.Node, shard: Shard, experts: fx.Node) -> fx.Node:
        """The value with zeros in the rows of others. experts: of every row, whole."""
        if node not in self._zero:
            _, own = own_rows(self.emit, experts, shard.experts // self.emit.ranks)
            away = self.emit.call(aten.logical_not.default, own)
            for _ in range(node.meta["val"].dim() - 1 - shard.dim):
                away = self.emit.call(aten.unsqueeze.default, away, away.meta["val"].dim())
            self._zero[node] = self.emit.call(aten.masked_fill.Scalar, node, away, 0.0)
        return self._zero[node]
