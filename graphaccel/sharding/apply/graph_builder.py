"""Append calls to a graph under construction, among them the collectives that convert placements.

Every call gets provenance and fake values. Collectives are functional
(`torch.ops._c10d_functional`). A collective has the name of its mesh axis where the runtime inserts
this rank's group. A call that depends on the rank's coordinate has meta "bind": argument position
-> (axis, step): the runtime replaces that argument by coordinate * step, so that the text of the
graph is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.ir.fake_calls import fake_call
from graphaccel.ir.fakes import Fakes
from graphaccel.ir.nodes import new_node
from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.shard import Placement, Shard

aten = torch.ops.aten
_funcol = torch.ops._c10d_functional


class Emitter:
    """Appends calls to `graph`; `meta` is the provenance that every new node gets.

    axis, ranks: of the mesh axis that collectives run over. fakes: see `set_value`. shared: nodes
    that several lowerings read, by key.
    """

    def __init__(
        self, graph: fx.Graph, axis: str, ranks: int, built_by: str, fakes: Fakes | None = None
    ) -> None:
        self.graph, self.axis, self.ranks, self.fakes = graph, axis, ranks, fakes
        self.meta: Mapping[str, Any] = {}
        self.shared: dict[Any, fx.Node] = {}
        self._made_by = built_by

    def call(self, target: Any, *args: Any, bind: Mapping[int, int] | None = None) -> fx.Node:
        """One call. bind: argument position -> step."""
        return self._placed(target, args, {}, bind)

    def call_with(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        """One call with keyword arguments."""
        return self._placed(target, args, kwargs, None)

    def _placed(
        self, target: Any, args: tuple, kwargs: dict[str, Any], bind: Mapping[int, int] | None
    ) -> fx.Node:
        kept = {k: v for k, v in self.meta.items() if k not in ("val", "sizes", "dims", "bind")}
        kept["made_by"] = f"{self._made_by} ({self.axis})"
        node = new_node(self.graph, "call_function", target, args, kwargs, None, kept)
        if bind:
            node.meta["bind"] = {at: (self.axis, step) for at, step in bind.items()}
        set_value(node, self.fakes)
        return node

    def all_reduce(self, node: fx.Node, op: str = "sum") -> fx.Node:
        """The sum (or maximum) over the axis, on all its ranks."""
        sent = self.call(_funcol.all_reduce.default, self.contiguous(node), op, self.axis)
        return self.call(_funcol.wait_tensor.default, sent)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """The value with contiguous strides, as kernels and collectives require; copied if
        needed."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call_with(
            aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )

    def convert(self, node: fx.Node, source: Placement, target: Placement) -> fx.Node:
        """The same value in another placement. Raises ValueError where there is no conversion."""
        if source == target:
            return node
        if source == REPLICATED:
            if target == PARTIAL:
                return self.call(aten.div.Tensor, node, self.ranks)
            assert isinstance(target, Shard)
            return self._narrow(node, target)
        if source == PARTIAL and target == REPLICATED:
            return self.all_reduce(node)
        if source == PARTIAL and isinstance(target, Shard):
            return self._reduce_scatter(node, target)
        if isinstance(source, Shard) and target == REPLICATED:
            return self._all_gather(node, source)
        if isinstance(source, Shard) and isinstance(target, Shard):
            through = source.padding or target.padding  # an all-to-all needs equal parts
            if source.dim == target.dim or through:  # other sections of one dim
                return self._narrow(self._all_gather(node, source), target)
            return self._all_to_all(node, source, target)
        raise ValueError(f"no conversion from {source} to {target}")

    def _padded(self, node: fx.Node, shard: Shard) -> fx.Node:
        """A full tensor with zeros after the end of the dim that is sharded unevenly."""
        if not shard.padding:
            return node
        behind = node.meta["val"].dim() - 1 - shard.dim
        widths = [0, 0] * behind + [0, shard.padding]
        return self.call(aten.constant_pad_nd.default, node, widths, 0)

    def masked(self, node: fx.Node, shard: Shard, value: float) -> fx.Node:
        """A shard with `value` in its padding, which only the last rank has."""
        tensor = node.meta["val"]
        count = tensor.shape[shard.dim]
        place = self.call_with(aten.arange.default, (count,), {"device": tensor.device})
        place = self.call(aten.add.Tensor, place, 0, bind={1: count})
        behind = self.call(aten.ge.Scalar, place, count * self.ranks - shard.padding)
        for _ in range(tensor.dim() - 1 - shard.dim):
            behind = self.call(aten.unsqueeze.default, behind, len(behind.meta["val"].shape))
        return self.call(aten.masked_fill.Scalar, node, behind, value)

    def _narrow(self, node: fx.Node, shard: Shard) -> fx.Node:
        node = self._padded(node, shard)
        shape = list(node.meta["val"].shape)
        size = shape[shard.dim] // (shard.outer * self.ranks)
        if shard.outer == 1:
            part = self.call(aten.narrow.default, node, shard.dim, 0, size, bind={2: size})
        else:
            seen = self._seen(shape, shard, self.ranks)
            spread = self.call(aten.reshape.default, node, seen)
            taken = self.call(aten.select.int, spread, shard.dim + 1, 0, bind={2: 1})
            part = self.call(aten.reshape.default, taken, list(shard.local(shape, self.ranks)))
        return self.contiguous(part)

    def _seen(self, shape: list[int], shard: Shard, ranks: int) -> list[int]:
        """The shape with its sharded dim viewed as [outer, ranks, rest]."""
        d, size = shard.dim, shape[shard.dim]
        return [*shape[:d], shard.outer, ranks, size // (shard.outer * ranks), *shape[d + 1 :]]

    def _all_gather(self, node: fx.Node, shard: Shard) -> fx.Node:
        shape = list(node.meta["val"].shape)
        sent = self.call(
            _funcol.all_gather_into_tensor.default, self.contiguous(node), self.ranks, self.axis
        )
        whole = self._unstacked(self.call(_funcol.wait_tensor.default, sent), shape, shard)
        if not shard.padding:
            return whole
        size = whole.meta["val"].shape[shard.dim] - shard.padding
        return self.contiguous(self.call(aten.narrow.default, whole, shard.dim, 0, size))

    def _unstacked(self, stacked: fx.Node, shape: list[int], shard: Shard) -> fx.Node:
        """The ranks' parts of `shape`, stacked along dim 0, moved to their places in the full
        tensor."""
        d = shard.dim
        full = [n * self.ranks if i == d else n for i, n in enumerate(shape)]
        if prod(shape[:d]) * shard.outer == 1:
            return self._shaped(stacked, full)
        seen = [self.ranks, *shape[:d], shard.outer, shape[d] // shard.outer, *shape[d + 1 :]]
        spread = self.call(aten.reshape.default, stacked, seen)
        order = [*range(1, d + 2), 0, *range(d + 2, len(seen))]
        moved = self.call(aten.permute.default, spread, order)
        return self.contiguous(self._shaped(moved, full))

    def _stacked(self, node: fx.Node, shard: Shard) -> tuple[fx.Node, list[int]]:
        """The parts of a full tensor stacked along dim 0, and the shape of one."""
        local = list(shard.local(node.meta["val"].shape, self.ranks))
        node = self._padded(node, shard)
        d, shape = shard.dim, list(node.meta["val"].shape)
        if prod(shape[:d]) * shard.outer > 1:
            spread = self.call(aten.reshape.default, node, self._seen(shape, shard, self.ranks))
            order = [d + 1, *range(d + 1), *range(d + 2, len(shape) + 2)]
            node = self.contiguous(self.call(aten.permute.default, spread, order))
        first = [self.ranks * local[0], *local[1:]]
        return self.contiguous(self._shaped(node, first)), local

    def _shaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(node.meta["val"].shape) == shape:
            return node
        return self.call(aten.reshape.default, node, shape)

    def _reduce_scatter(self, node: fx.Node, shard: Shard) -> fx.Node:
        stacked, local = self._stacked(node, shard)
        sent = self.call(
            _funcol.reduce_scatter_tensor.default, stacked, "sum", self.ranks, self.axis
        )
        return self._shaped(self.call(_funcol.wait_tensor.default, sent), local)

    def _all_to_all(self, node: fx.Node, source: Shard, target: Shard) -> fx.Node:
        stacked, part = self._stacked(node, target)
        counts = [part[0]] * self.ranks
        sent = self.call(_funcol.all_to_all_single.default, stacked, counts, counts, self.axis)
        received = self.call(_funcol.wait_tensor.default, sent)
        return self._unstacked(received, part, source)


def set_value(node: fx.Node, fakes: Fakes | None = None) -> None:
    """Compute a call's fake value from those of its arguments (inside their fake mode, or by
    `fakes`, where tensor metadata is enough)."""
    make: Any = node.target
    if fakes is not None:
        node.meta["val"] = fakes.call(make, node.args, node.kwargs)
        return
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    node.meta["val"] = fake_call(make, args, kwargs)
