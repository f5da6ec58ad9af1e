"""Expert parallelism: dispatch tokens (rows) to the ranks of their experts, and combine them.

    %x: f32[64,32], this rank's rows              %rows, %order, %back, %counts = expert_rows(%ids)
    %y = expert_product(%x, %w, %ids)             %sorted = aten.index_select(%x, 0, %order)
                                                  %sent = exchange_rows(%sorted, %counts, "expert")
                                                  %came = wait_tensor(%sent)
                                                  %own = aten.index_select(%ids, 0, %rows)
                                                  %y = expert_product(%came, %w, %own)

Meta "chosen" marks values that have one row for each row that chose one of this rank's experts; in
the graph their size is an equal share of all rows.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphaccel.kernels.ops.expert_rows import EXCHANGE, ROWS
from graphaccel.sharding.apply.graph_builder import Emitter
from graphaccel.sharding.rules.shard import Shard

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_OWN, _ORDER, _BACK, _COUNTS = range(4)


class ChosenRows:
    """The routing of the rows of one graph, and the conversions that follow from it. experts: the
    replicated node with the expert of every row."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self._tables: dict[fx.Node, list[fx.Node]] = {}
        self._ids: dict[fx.Node, fx.Node] = {}

    def ids(self, experts: fx.Node, count: int) -> fx.Node:
        """The expert ids of this rank's rows."""
        if experts not in self._ids:
            own = self._table(experts, count)[_OWN]
            self._ids[experts] = self._chosen(aten.index_select.default, experts, 0, own)
        return self._ids[experts]

    def take(self, node: fx.Node, shard: Shard, experts: fx.Node) -> fx.Node:
        """This rank's rows of a replicated value."""
        own = self._table(experts, shard.experts)[_OWN]
        return self._chosen(aten.index_select.default, node, shard.dim, own)

    def send(self, node: fx.Node, shard: Shard, experts: fx.Node) -> fx.Node:
        """This rank's rows of a value whose rows are sharded evenly, in order."""
        table = self._table(experts, shard.experts)
        ordered = self.emit.call(aten.index_select.default, node, 0, table[_ORDER])
        sent = self._chosen(EXCHANGE, ordered, table[_COUNTS], False, self.emit.axis)
        return self._chosen(_WAIT, sent)

    def slice_backward(self, node: fx.Node, sizes: list[int], start: int, step: int) -> fx.Node:
        """Zeros of `sizes` with `node` at every `step`-th position of the last dim from `start` on,
        with as many rows as `node`: `aten.slice_backward` would need that number as an argument."""
        width, each = sizes[-1], int(node.meta["val"].shape[-1]) * step
        if step > 1:
            node = self._chosen(aten.unsqueeze.default, node, len(sizes))
            node = self._chosen(aten.constant_pad_nd.default, node, [0, step - 1])
            node = self._chosen(aten.reshape.default, node, [*sizes[:-1], each])
        around = [start, width - start - each]
        return self._chosen(aten.constant_pad_nd.default, node, around)

    def send_back(self, node: fx.Node, shard: Shard, experts: fx.Node) -> fx.Node:
        """The inverse of `send`: rows sharded evenly, in their original order."""
        table = self._table(experts, shard.experts)
        node = self.emit.contiguous(node)
        node.meta["chosen"] = True
        sent = self.emit.call(EXCHANGE, node, table[_COUNTS], True, self.emit.axis)
        came = self.emit.call(_WAIT, sent)
        return self.emit.call(aten.index_select.default, came, 0, table[_BACK])

    def spread(self, node: fx.Node, shard: Shard, experts: fx.Node, rows: int) -> fx.Node:
        """A tensor of all rows with zeros in the rows of other ranks: a partial sum over the
        ranks."""
        shape = list(node.meta["val"].shape)
        shape[shard.dim] = rows
        zeros = self.emit.call(aten.new_zeros.default, node, shape)
        own = self._table(experts, shard.experts)[_OWN]
        return self.emit.call(aten.index_copy.default, zeros, shard.dim, own, node)

    def _table(self, experts: fx.Node, count: int) -> list[fx.Node]:
        if experts not in self._tables:
            ranks = self.emit.ranks
            held, share = count // ranks, -(-experts.meta["val"].shape[0] // ranks)
            built = self.emit.call(ROWS, experts, 0, held, 0, ranks, bind={1: held, 3: share})
            results = [self.emit.call(operator.getitem, built, k) for k in range(4)]
            built.meta["chosen"] = results[_OWN].meta["chosen"] = True
            self._tables[experts] = results
        return self._tables[experts]

    def _chosen(self, target: object, *args: object) -> fx.Node:
        node = self.emit.call(target, *args)
        node.meta["chosen"] = True
        return node
