"""Determine what can be sharded on one mesh axis: shards of tensors, strategies of calls.

The initial shards depend on the axis: features of parameters and, if asked for, the sequence
("tensor"), the sequence ("context"), examples and experts ("expert"). From there shards spread over
the strategies of calls (`sharding.rules.strategies`) until nothing new follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.capture.symbols import BATCH, SEQUENCE
from graphaccel.ir.values import operands
from graphaccel.sharding.rules.batch_placement import REPLICATED
from graphaccel.sharding.rules.call_values import (
    HELD,
    Value,
    free_nodes,
    looks,
    mutated_buffers,
    placed_calls,
    signature,
    source_of,
    splits_batch,
    tensor_of,
)
from graphaccel.sharding.rules.notation import output_shapes, shape_of, tensor_arguments
from graphaccel.sharding.rules.shard import (
    LEAST_WIDTH,
    Placement,
    Row,
    Shard,
    Shards,
    shard_of,
    shards_of,
)
from graphaccel.sharding.rules.strategies import rows_of
from graphaccel.sharding.solve.head_parallel import (
    ByHeads,
    HeadsDoNotDivide,
    attention_rows,
    by_heads,
    split,
)

_ROUNDS = 12
_NONE: Shards = frozenset()


class Shardable:
    """One graph on one axis of `ranks`; `spread` finds its shards and strategies.

    kinds: placeholder → its input. free: nodes that are the same on every rank. calls: those that
    have a choice. held: parameters and buffers. stored: those, and views and casts of them.
    shards: those of each tensor. rows: strategies of each call. pins: placements of parameters by
    name.
    """

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Sequence[GraphInput],
        outputs: Sequence[GraphOutput],
        axis: str,
        ranks: int,
        pins: Mapping[str, Placement],
        sequence: bool,
        keep_outputs: bool = False,
        context_by: str = "",
        inner: int = 1,
    ) -> None:
        """Raises HeadsDoNotDivide where `context_by` asks for heads and none divide."""
        self.graph, self.axis, self.ranks = graph, axis, ranks
        self.pins, self.sequence, self.keep_outputs = pins, sequence, keep_outputs
        nodes = list(graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        self.kinds = dict(zip(placeholders, inputs, strict=False))
        self.outputs = list(zip(operands(graph.output_node())[0], outputs, strict=False))
        # With one example a merged [batch x sequence] dim is sharded along the sequence.
        self.examples = next(
            (int(n.meta["val"].shape[d]) for n in placeholders
             for d, size in enumerate(n.meta.get("dims", ())) if size == BATCH), 0
        )  # fmt: skip
        self.free = free_nodes(graph, self.kinds, mutated_buffers(outputs))
        self.calls = placed_calls(graph, self.kinds, outputs, self.free)
        self.held = [n for n, spec in self.kinds.items() if spec.kind in HELD]
        self.stored = set(self.held)  # and views and casts of them
        for node in self.calls:
            if looks(node) and node.all_input_nodes[0] in self.stored:
                self.stored.add(node)
        self.shards: dict[Value, Shards] = {}
        self.rows: dict[fx.Node, tuple[Row, ...]] = {}
        self._known: dict[Any, tuple[Row, ...]] = {}
        self._shards_of: dict[int, tuple[tuple[Shards, ...], tuple[Shards, ...]]] = {}
        self._alike: dict[Shards, Shards] = {}  # equal sets as one object: they are compared often
        self._reads = {n: tuple(map(source_of, tensor_arguments(n))) for n in self.calls}
        self._gives = {n: [(n, k) for k in range(len(output_shapes(n)))] for n in self.calls}
        numbers: dict[Any, int] = {}
        self.kind = {n: numbers.setdefault(signature(n), len(numbers)) for n in self.calls}
        self._touched: dict[Value, list[fx.Node]] = {}  # the calls that read or return it
        for n in self.calls:
            for value in (*self._reads[n], *self._gives[n]):
                self._touched.setdefault(value, []).append(n)
        self.inner, self.context_by = inner, context_by if axis == "context" else ""
        self.heads = self._heads(context_by)
        self._stale = set(self.calls)  # calls with shards that are not spread yet

    def spread(self) -> Shardable:
        """Itself, with `shards` and `rows` filled: shards spread from where they begin over the
        strategies of calls, until nothing new follows."""
        self._seed()
        for _ in range(_ROUNDS):
            if not self._stale:
                break
            for node in (*self.calls, *reversed(self.calls)):
                if node in self._stale:
                    self._spread(node)
        for node in self.calls:
            self.rows[node] = self._rows(node)
        return self

    def _heads(self, context_by: str) -> ByHeads:
        """Where attention can be sharded by heads on the context axis. Raises HeadsDoNotDivide."""
        if self.axis != "context" or context_by == "sequence":
            return ByHeads()
        match = by_heads(self.calls, self._reads, self._gives, self.ranks, self.inner)
        if context_by == "heads" and not match.calls:
            over = f"context={self.ranks} x tensor={self.inner}"
            raise HeadsDoNotDivide(f"there is no attention whose heads divide by {over}")
        return match

    def stored_placements(self, node: fx.Node) -> tuple[Placement, ...]:
        """The possible placements of a parameter or buffer: its pin, or replicated and its
        shards."""
        pin = self.pins.get(self.kinds[node].name)
        if pin is not None:
            return (pin,)
        if self.kinds[node].kind == "buffer":
            return (REPLICATED,)
        if self.axis == "expert" and self._experts(node):
            return (Shard(0),)  # that is what the axis is for
        return (REPLICATED, *sorted(self.shards[(node, 0)]))

    def _experts(self, node: fx.Node) -> bool:
        """Whether a parameter holds experts, and every call that reads it has a strategy for a
        shard."""
        if len(shape_of(node)) != 3 or Shard(0) not in self.shards[(node, 0)]:
            return False
        uses = [
            (user, at)
            for user in node.users
            for at, argument in enumerate(tensor_arguments(user))
            if argument is node and user in self.rows
        ]
        return all(any(r.inputs[at] == Shard(0) for r in self.rows[user]) for user, at in uses)

    def users(self) -> dict[Value, list[tuple[fx.Node, int]]]:
        """Value → (call, position) that reads it; an output reads at position -1."""
        users: dict[Value, list[tuple[fx.Node, int]]] = {}
        for node in self.calls:
            for position, value in enumerate(self._reads[node]):
                users.setdefault(value, []).append((node, position))
        result = self.graph.output_node()
        for node, spec in self.outputs:
            if isinstance(node, fx.Node) and (spec.kind != "output" or self.keep_outputs):
                users.setdefault(source_of(node), []).append((result, -1))
        return users

    def _seed(self) -> None:
        for node in self.held:
            if not isinstance(node.meta["val"], torch.Tensor):
                continue
            shape = shape_of(node)
            results = set()
            if self.axis == "tensor" and self.kinds[node].kind == "parameter":
                results = {Shard(d) for d in range(len(shape))} | self._padded(shape)
            if self.axis == "expert" and len(shape) == 3:
                results = {Shard(0)}
            pin = self.pins.get(self.kinds[node].name)
            if isinstance(pin, Shard):
                results.add(pin)
            self.shards[(node, 0)] = frozenset(s for s in results if s.fits(shape, self.ranks))
        tensor = SEQUENCE if self.sequence else None
        wanted = {"tensor": tensor, "context": SEQUENCE, "expert": BATCH}.get(self.axis)
        for node in self.calls:
            dims = node.meta.get("dims", ())
            several = isinstance(node.meta["val"], (tuple, list))
            for k, shape in enumerate(output_shapes(node)):
                sizes = dims[k] if several and k < len(dims) else dims
                results = {
                    Shard(d)
                    for d, size in enumerate(sizes[: len(shape)] if not several or sizes else ())
                    if wanted is not None and size == wanted
                }
                self.shards[(node, k)] = frozenset(s for s in results if s.fits(shape, self.ranks))
        for value in self.heads.seeds:
            self._add(value, split(tensor_of(value).shape, self.ranks, self.inner))

    def _padded(self, shape: Sequence[int]) -> set[Shard]:
        """Shards of dims that the ranks do not divide, if only little of them is padding."""
        if len(shape) > 2:
            return set()
        wide = (d for d, n in enumerate(shape) if n % self.ranks and n >= LEAST_WIDTH * self.ranks)
        return {shard_of(d, 1, shape, self.ranks) for d in wide}

    def _spread(self, node: fx.Node) -> None:
        """Add the shards of a call's other tensors that follow from its strategies."""
        self._stale.discard(node)
        rows = self._rows(node)
        if id(rows) not in self._shards_of:
            self._shards_of[id(rows)] = shards_of(rows)
        given, built = self._shards_of[id(rows)]
        for source, shards in zip(self._reads[node], given, strict=True):
            if source in self.shards:
                self._add(source, shards, stored=source[0] in self.stored)
        for value, shards in zip(self._gives[node], built, strict=True):
            self._add(value, shards)

    def _add(self, value: Value, shards: Shards, *, stored: bool = False) -> None:
        known = self.shards[value]
        if stored:
            shards = frozenset(s for s in shards if not s.by)
        if not shards <= known:
            both = known | shards
            self.shards[value] = self._alike.setdefault(both, both)
            self._stale.update(self._touched.get(value, ()))

    def _asked(self, node: fx.Node) -> tuple[Any, ...]:
        """A key that is equal for calls with the same strategies."""
        known, seen = self.shards, self.heads.elsewhere
        given = tuple(seen(node, value, known.get(value, _NONE)) for value in self._reads[node])
        return self.kind[node], given, tuple(seen(node, v, known[v]) for v in self._gives[node])

    def _rows(self, node: fx.Node) -> tuple[Row, ...]:
        key = self._asked(node)
        if key not in self._known:
            rows = rows_of(node, self.ranks, key[1], key[2])
            rows = tuple(r for r in rows if self._allowed(node, r))
            self._known[key] = attention_rows(node, rows, self.context_by)
        return self._known[key]

    def _allowed(self, node: fx.Node, row: Row) -> bool:
        """Compute on the tensor axis is never sharded by examples: that is what the data axis
        does."""
        if self.axis != "expert" and self.examples != 1:
            given = zip(self._reads[node], row.inputs, strict=True)
            built = zip(self._gives[node], row.outputs, strict=True)
            if any(splits_batch(v, p) for v, p in (*given, *built)):
                return False
        if row.lowering in ("expert_product", "expert_gradient"):
            return self.axis == "expert"  # other axes need equally many rows a rank
        if row.lowering == "causal":  # on tensor where its heads do not divide
            heads = shape_of(tensor_arguments(node)[0])[1]
            return self.axis == "context" or (self.sequence and heads % self.ranks > 0)
        return True
