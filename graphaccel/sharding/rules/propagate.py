"""Propagate the batch dim through a joint graph: the placement of every value on a split batch.

Microbatches (a virtual axis, time) and the data axis split the same tensor dim, so one analysis
serves both. A value is replicated (the same for every part of the batch), sharded on the dim that
carries the batch (possibly inside a merged one: a flattened [sequence, batch]), or a partial sum.
Where an op needs the full sum (the number of unignored labels as a divisor), the value is
*converted*:
  hoisted   it depends on the batch alone: computed once a step from the whole batch, exactly
  reduced   it depends on parameters (batch statistics): needs an all-reduce over the data axis, and
            cannot be split over time at all
Where a partial sum is needed of a value that is the same for every part, it is *shared out*
(divided by the number of parts).

Where examples mix, and over time where a full sum is needed, the rest of the forward becomes the
*head* (`sharding.rules.head`), which runs once on the whole batch. Of its results, each part of the
backward reads all, or its own *slice*.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphaccel.ir.calls import draws_by_shape, is_random
from graphaccel.ir.values import operands
from graphaccel.sharding.rules.batch_placement import (
    ANY,
    NO_RULE,
    PARTIAL,
    REPLICATED,
    WHOLE_SUM,
    BatchPlacement,
    Conflict,
    Placement,
    placed_at,
    sharded_dim,
)
from graphaccel.sharding.rules.examples import Examples
from graphaccel.sharding.rules.head import MOST, close, is_backward, share_of_weights
from graphaccel.sharding.rules.notation import Notation, tensor_arguments
from graphaccel.sharding.rules.ops.factories import COUNTS, UNIFORM
from graphaccel.sharding.rules.ops.indexing import only_counts_rows
from graphaccel.sharding.rules.ops.shapes import REGROUPS
from graphaccel.sharding.rules.table import rule_of

# The results of these depend on the strides of their argument.
_READ_MEMORY = frozenset(
    {torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default}
)
_RANDOM = torch.Tag.nondeterministic_seeded


def place_batch(
    graph: fx.Graph,
    batch_inputs: Mapping[str, Placement],
    symbol: Any,
    size: int,
    parameters: frozenset[str],
    *,
    over_time: bool = False,
    headed: bool = False,
) -> BatchPlacement:
    """Propagate the split of the batch through a joint graph.

    batch_inputs: placeholder name → where it carries the batch. symbol, size: the batch's symbol in
    `meta["dims"]`, and its size in the graph. parameters: placeholder names of parameters, and of
    buffers that the step changes. over_time: whether there are several microbatches. headed:
    whether a head may be formed: in a step with its loss.
    """
    rules: dict[fx.Node, Notation | None] = {}
    seeds: dict[fx.Node, str] = {}
    head: frozenset[fx.Node] = frozenset()
    while True:
        state = _State(Examples(symbol, size), head, rules)
        state.walk(graph, batch_inputs, parameters)
        more = state.seeds(over_time) if headed else {}
        if not more.keys() - seeds.keys():
            break
        seeds |= more
        head = close(graph, seeds)
    first = next((Conflict(n, seeds[n]) for n in graph.nodes if n in seeds), None)
    if first is not None:
        share = share_of_weights(graph, head, state.places, parameters, REPLICATED)
        if share > MOST:
            why = f"{first.reason}, and what follows holds {share:.0%} of the model's parameters"
            state.conflicts.insert(0, Conflict(first.node, why))
    # A value that was converted may have become replicated since: its inputs were converted, too.
    reduced = [n for n in state.reduced if state.places[n] == PARTIAL]
    needed = [n for n in state.hoisted if any(u not in state.hoisted for u in n.users)]
    return BatchPlacement(
        state.places,
        tuple(needed),
        tuple(reduced),
        frozenset(state.shared),
        tuple(state.conflicts),
        head,
        state.slices,
        first,
    )


def _divides(node: fx.Node) -> bool:
    """Whether, for replicated inputs, a shard of the result is the same call at a smaller size."""
    if node.target in COUNTS:
        return only_counts_rows(node)
    return node.target in UNIFORM or bool(node.all_input_nodes)


class _State:
    """The traversal: placements so far, and which values depend on more than the batch. rules: of
    calls, reused by all traversals."""

    def __init__(
        self, examples: Examples, head: frozenset[fx.Node], rules: dict[fx.Node, Notation | None]
    ) -> None:
        self.examples, self.head, self.rules = examples, head, rules
        self.hoisted: dict[fx.Node, None] = {}
        self.reduced: dict[fx.Node, None] = {}
        self.readers: dict[fx.Node, None] = {}  # readers of reduced values
        self.constants: set[fx.Node] = set()  # inputs that no part has a slice of
        self._start()

    def _start(self) -> None:
        self.places: dict[fx.Node, Any] = {}
        self.learned: set[fx.Node] = set()  # depends on a parameter, or on a part's random numbers
        self.drawn: set[fx.Node] = set()  # depends on random numbers of a part
        self.shared: set[tuple[fx.Node, int]] = set()
        self.slices: dict[fx.Node, Placement] = {}
        self.conflicts: list[Conflict] = []

    def walk(
        self, graph: fx.Graph, batch_inputs: Mapping[str, Placement], parameters: frozenset[str]
    ) -> None:
        """Place every node. A conversion changes what earlier users of the value read: repeat until
        there are no new ones."""
        while True:
            converted = len(self.hoisted), len(self.reduced)
            self._start()
            for node in graph.nodes:
                if node.op == "placeholder":
                    self.places[node] = batch_inputs.get(node.name, REPLICATED)
                    if node.name in parameters:
                        self.learned.add(node)
                    elif node.name not in batch_inputs and self.examples.counted_in(node):
                        self.hoisted[node] = None  # a constant with one row an example
                        self.constants.add(node)
                elif node.op == "call_function":
                    self.visit(node)
            if (len(self.hoisted), len(self.reduced)) == converted:
                return

    def seeds(self, over_time: bool) -> dict[fx.Node, str]:
        """Nodes that would have to run on the whole batch, each with the reason. Conflicts in the
        backward are reported only if the forward has none, as they may follow from those.

        Batch statistics are summed over the data axis (`passes.microbatch.synchronise_batch_norm`).
        """
        results = {
            c.node: c.reason
            for c in self.conflicts
            if over_time or "batch_norm" not in str(c.node.target)
        }
        if over_time:
            results |= dict.fromkeys(self.readers, WHOLE_SUM)
        ahead = {n: reason for n, reason in results.items() if not is_backward(n)}
        return ahead or dict(list(results.items())[:1])

    def visit(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if node not in self.head and draws_by_shape(node) and not self.examples.counted_in(node):
            self._hoist(node)  # numbers that all parts share
            return
        if is_random(node) or any(n in self.drawn for n in inputs):
            self.drawn.add(node)
        if node in self.drawn or any(n in self.learned for n in inputs):
            self.learned.add(node)
        if node in self.head:
            self._in_head(node)
            return
        if node in self.hoisted and self.examples.counted_in(node):
            self.places[node] = REPLICATED
            return
        whole = any(self._is_whole(n) for n in inputs)
        result = node.target is operator.getitem and node.args[0] in self.hoisted
        if result or (whole and node not in self.learned):
            self._hoist(node)
            return
        if node.target is operator.getitem:
            source, index = operands(node)
            place = self.places[source]
            self.places[node] = place[index] if isinstance(place, tuple) else place
            return
        tensors = tensor_arguments(node)
        places = [self._current(t) for t in tensors]
        if not whole and all(p == REPLICATED for p in places):
            self.places[node] = self._place_factory(node)
            return
        if node not in self.rules:
            self.rules[node] = rule_of(node)
        notation = self.rules[node]
        if notation is None:
            self._without_rule(node, tensors, places)
            return
        for i, tensor in enumerate(tensors):
            if self._is_whole(tensor):
                places[i] = self._slice(tensor, i, notation, places)
                if places[i] == REPLICATED and i not in notation.unread:
                    self._refuse(node, "it mixes the examples of a batch")
                    return
        self._apply(node, notation, tensors, places)

    def _without_rule(self, node: fx.Node, tensors: list[fx.Node], places: list) -> None:
        """Any op may run on unsplit values, such as one that reads only weights and gradients of
        weights (the matrix exponential that keeps a weight orthogonal)."""
        sharded = any(sharded_dim(place) for place in places)
        if sharded or node.target in _READ_MEMORY:
            self._refuse(node, f"{node.target} {NO_RULE}")
            return
        for tensor, place in zip(tensors, places, strict=True):
            if place == PARTIAL:
                self._convert(tensor, node)
        self.places[node] = self._place_factory(node)

    def _current(self, node: fx.Node) -> Placement:
        if node.op == "placeholder":  # each part has its own slice of a batch leaf
            return self.places[node]
        return REPLICATED if node in self.hoisted or node in self.reduced else self.places[node]

    def _in_head(self, node: fx.Node) -> None:
        """Place a node of the head: it sees the whole batch. Inputs that depend on the batch are
        hoisted."""
        self.places[node] = REPLICATED
        for source in node.all_input_nodes:
            if source in self.head or source in self.hoisted:
                continue
            if self.places[source] == REPLICATED:
                if source in self.drawn:
                    reason = "it needs a number that is drawn anew for every part of the batch"
                    self.conflicts.append(Conflict(node, reason))
            elif source not in self.learned:
                self._hoist(source)

    def _hoist(self, node: fx.Node) -> None:
        self.hoisted[node] = None
        if node.op != "placeholder":
            self.places[node] = REPLICATED

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether a value contains all examples, where others contain those of one part."""
        known = node in self.head or node in self.hoisted
        given = node.op == "placeholder" and node not in self.constants
        return known and not given and self.examples.counted_in(node)

    def _slice(self, node: fx.Node, position: int, rule: Notation, places: list) -> Placement:
        """The slice of a whole-batch value that a part reads: the examples of the operands it is
        read with, or those along the only dim of the batch's size; REPLICATED if neither is
        known."""
        if node in self.slices:
            return self.slices[node]
        names = rule.inputs[position]
        for other, place in zip(rule.inputs, places, strict=False):
            at = sharded_dim(place)
            if at is not None and other[at[0]] in names and other[at[0]] not in ("", "1"):
                self.slices[node] = placed_at(names.index(other[at[0]]), at[1] or 1)
                return self.slices[node]
        dims = node.meta["dims"]
        carry = self.examples.carrying(dims)
        if len(carry) == 1 and dims[carry[0]] == self.examples.symbol:
            self.slices[node] = carry[0]
            return carry[0]
        return REPLICATED

    def _place_factory(self, node: fx.Node) -> Any:
        """Place the result of numbers or replicated values: sharded if the batch is among its dims.

        A shard must be the same op at a smaller size: not so for tensors whose elements depend on
        their position, unless they number rows that are sharded too.
        """

        def place(dims: tuple) -> Placement:
            carry = self.examples.carrying(dims)
            if len(carry) > 1 or (carry and not _divides(node)):
                self._conflict(node, "it numbers the examples of a batch")
            if not carry:
                return REPLICATED
            if not self.examples.multiple(dims[carry[0]]):  # a queue without its last examples
                self._conflict(node, "its size is no multiple of the number of examples")
            uniform = node.target in UNIFORM or node.target in COUNTS
            merged = uniform and dims[carry[0]] != self.examples.symbol
            return placed_at(carry[0], ANY if merged else 1)

        dims = node.meta["dims"]
        if isinstance(node.meta["val"], (tuple, list)):
            return tuple(place(d) for d in dims)
        return place(dims)

    def _apply(self, node: fx.Node, rule: Notation, tensors: list[fx.Node], places: list) -> None:
        places = [REPLICATED if i in rule.unread else p for i, p in enumerate(places)]
        split = [(i, *at) for i, p in enumerate(places) if (at := sharded_dim(p))]
        sharded = {rule.inputs[i][dim] for i, dim, _ in split}
        partial = {i for i, p in enumerate(places) if p == PARTIAL}
        outers = {outer for _, _, outer in split} - {ANY}
        if node.target in REGROUPS and (sharded & {"", "1"} or outers - {1}):
            self._regroup(node, tensors[0], places[0])
            return
        if any(index in ("", "1") or index in rule.whole for index in sharded):
            self._refuse(node, "it mixes the examples of a batch")
            return
        if len(sharded) > 1 or len(outers) > 1:
            self._refuse(node, "it combines different examples of a batch with each other")
            return
        group = frozenset() if sharded else self._linear_group(rule, partial)
        for i in partial - group:
            self._convert(tensors[i], node)
        partial &= group
        if partial:
            for i in group - partial:
                value = tensors[i].meta["val"]
                if not (value.is_floating_point() or value.is_complex()):
                    self._refuse(node, "it adds a whole number to a partial sum")
                    return
                self.shared.add((node, i))
            count = len(rule.outputs)
            self._set(node, [REPLICATED if k in rule.kept else PARTIAL for k in range(count)])
            return
        if not sharded:
            self.places[node] = self._place_factory(node)
            return
        (index,) = sharded
        (outer,) = outers or {ANY}
        outputs: list[Placement] = []
        for position, names in enumerate(rule.outputs):
            if index in names:
                outputs.append(placed_at(names.index(index), outer))
            elif position in rule.kept:
                outputs.append(REPLICATED)
            elif rule.sums:
                outputs.append(PARTIAL)
            else:
                self._refuse(node, "it reduces over the examples of a batch, and not by a sum")
                return
        if self.examples.rows_of_sums(node, outputs):  # eye(batch) @ x: one row an example
            self._refuse(node, "it combines different examples of a batch with each other")
            return
        self._set(node, outputs)

    def _regroup(self, node: fx.Node, source: fx.Node, place: Placement) -> None:
        """Place a reshape that merges dims before the batch with it, or splits them off."""
        match = self.examples.regrouped(node, source, place)
        if match is None:
            self._refuse(node, "it mixes the examples of a batch")
        else:
            self._set(node, [match])

    @staticmethod
    def _linear_group(rule: Notation, partial: set[int]) -> frozenset[int]:
        return max(rule.linear, key=lambda g: len(g & partial), default=frozenset())

    def _convert(self, node: fx.Node, reader: fx.Node) -> None:
        """Record that the full sum is needed: hoisted if it depends on the batch alone, else
        reduced."""
        if node in self.learned:
            self.reduced[node] = self.readers[reader] = None
        else:
            self.hoisted[node] = None

    def _set(self, node: fx.Node, outputs: list[Placement]) -> None:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            self.places[node] = outputs[0]
            return
        # outputs that are None (unwanted gradients) have no entry in a rule
        remaining = iter(outputs)
        self.places[node] = tuple(
            next(remaining) if isinstance(v, torch.Tensor) else REPLICATED for v in value
        )

    def _refuse(self, node: fx.Node, reason: str) -> None:
        self._conflict(node, reason)
        self.places[node] = self._place_factory(node)

    def _conflict(self, node: fx.Node, reason: str) -> None:
        """Record that examples mix. What depends on the batch alone is hoisted instead."""
        if node in self.learned:
            self.conflicts.append(Conflict(node, reason))
        else:
            self.hoisted[node] = None
