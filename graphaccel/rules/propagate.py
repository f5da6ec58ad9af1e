"""Where the batch goes: the placement of every value of a joint graph when the batch is split.

Microbatches (a virtual axis, time) and the data axis split the same tensor dim, so one analysis
serves both. A value is replicated (the same for every part of the batch), sharded on the dim that
carries the batch (perhaps inside a merged one: a flattened [sequence, batch]), or a partial sum.
Where an op needs the whole sum (the number of unignored labels as a divisor), the value is
*converted*:
  hoisted   it depends on the batch alone: computed once a step from the whole batch, exactly
  reduced   it depends on parameters (batch statistics): needs an all-reduce over the data axis, and
            can not be split over time at all
A value that is the same for every part, where a partial sum is wanted, is *shared out* (divided by
the number of parts).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphaccel.rules.factories import COUNTS, UNIFORM
from graphaccel.rules.indexing import only_counts_rows
from graphaccel.rules.notation import Notation, arguments, reshaped, shape_of, tensor_arguments
from graphaccel.rules.shapes import REGROUPS
from graphaccel.rules.shard import Shard
from graphaccel.rules.table import rule_of

REPLICATED = "replicated"
PARTIAL = "partial"
NO_RULE = "has no sharding rule"
"""How the reason of a conflict ends where the op is in no table."""
Placement = str | int | Shard
"""An int: sharded on that tensor dim, whose outermost part is the batch. A Shard: on a dim in which
`outer` sections stand before the batch, each with all examples."""
_ANY = 0
"""`outer` of what is the same for every example, at every place of a merged dim."""

# What they give depends on how their argument lies in memory.
_READ_MEMORY = frozenset(
    {torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default}
)
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class Conflict:
    """A node at which examples of the batch mix, and why."""

    node: fx.Node
    reason: str


@dataclass(frozen=True)
class BatchPlacement:
    """Result of `place_batch`.

    places: placement per node (a tuple for several outputs).
    hoisted, reduced: values converted from a partial sum to the whole sum.
    shared: (user, position among its tensor arguments) where a replicated value is divided by the
    parts.
    conflicts: where the batch can not be split at all.
    """

    places: Mapping[fx.Node, Any] = field(repr=False)
    hoisted: tuple[fx.Node, ...]
    reduced: tuple[fx.Node, ...]
    shared: frozenset[tuple[fx.Node, int]]
    conflicts: tuple[Conflict, ...]


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers; attention without dropout does not, though tagged so."""
    if _RANDOM not in getattr(node.target, "tags", ()):
        return False
    return arguments(node).get("dropout_p") != 0.0


def place_batch(
    graph: fx.Graph,
    batch_inputs: Mapping[str, int],
    symbol: Any,
    size: int,
    parameters: frozenset[str],
) -> BatchPlacement:
    """Propagate the split of the batch through a joint graph.

    batch_inputs: placeholder name → dim that carries the batch. symbol, size: the batch's symbol in
    `meta["dims"]`, and its size in the graph. parameters: placeholder names of parameters, and of
    buffers that the step changes.
    """
    converted: tuple[dict[fx.Node, None], dict[fx.Node, None]] = ({}, {})
    rules: dict[fx.Node, Notation | None] = {}
    while True:  # a conversion changes what earlier users of the value saw
        state = _State(symbol, size, *converted, rules)
        for node in graph.nodes:
            if node.op == "placeholder":
                state.places[node] = batch_inputs.get(node.name, REPLICATED)
                if node.name in parameters:
                    state.learned.add(node)
            elif node.op == "call_function":
                state.visit(node)
        if (state.hoisted, state.reduced) == converted:
            break
        converted = (state.hoisted, state.reduced)
    return BatchPlacement(
        state.places,
        tuple(state.hoisted),
        tuple(state.reduced),
        frozenset(state.shared),
        tuple(state.conflicts),
    )


def _lies(place: Placement) -> tuple[int, int] | None:
    """The dim the batch lies in and what stands before it there, if a value is sharded."""
    if isinstance(place, int):
        return place, 1
    return (place.dim, place.outer) if isinstance(place, Shard) else None


def _placed(dim: int, outer: int) -> Placement:
    return dim if outer == 1 else Shard(dim, outer)


def _divides(node: fx.Node) -> bool:
    """Whether a part of what a call makes of replicated values is a smaller call."""
    if node.target in COUNTS:
        return only_counts_rows(node)
    return node.target in UNIFORM or bool(node.all_input_nodes)


class _State:
    """The walk: placements so far, and which values depend on more than the batch. rules: of calls,
    found in any walk."""

    def __init__(
        self,
        symbol: Any,
        size: int,
        hoisted: Mapping[fx.Node, None],
        reduced: Mapping[fx.Node, None],
        rules: dict[fx.Node, Notation | None],
    ) -> None:
        self.symbol, self.size, self.rules = symbol, size, rules
        self.places: dict[fx.Node, Any] = {}
        self.learned: set[fx.Node] = set()  # depends on a parameter, or on random numbers
        self.hoisted = dict(hoisted)
        self.reduced = dict(reduced)
        self.shared: set[tuple[fx.Node, int]] = set()
        self.conflicts: list[Conflict] = []

    def visit(self, node: fx.Node) -> None:
        if is_random(node) or any(n in self.learned for n in node.all_input_nodes):
            self.learned.add(node)
        if node.target is operator.getitem:
            source, index = node.args
            place = self.places[source]
            self.places[node] = place[index] if isinstance(place, tuple) else place
            return
        tensors = tensor_arguments(node)
        places = [self._current(t) for t in tensors]
        if all(p == REPLICATED for p in places):
            self.places[node] = self._made(node)
            return
        if node not in self.rules:
            self.rules[node] = rule_of(node)
        notation = self.rules[node]
        if notation is None:
            self._without_rule(node, tensors, places)
            return
        self._apply(node, notation, tensors, places)

    def _without_rule(self, node: fx.Node, tensors: list[fx.Node], places: list) -> None:
        """Any op may be run on whole values, as one that reads weights and gradients of weights
        alone does (the exponential of a matrix that keeps a weight orthogonal)."""
        sharded = any(_lies(place) for place in places)
        if sharded or node.target in _READ_MEMORY:
            self._refuse(node, f"{node.target} {NO_RULE}")
            return
        for tensor, place in zip(tensors, places, strict=True):
            if place == PARTIAL:
                self._convert(tensor)
        self.places[node] = self._made(node)

    def _current(self, node: fx.Node) -> Placement:
        return REPLICATED if node in self.hoisted or node in self.reduced else self.places[node]

    def _made(self, node: fx.Node) -> Any:
        """Values made of numbers or replicated values: sharded if the batch is among their dims.

        A part of one must be the same op at a smaller size: not so for tensors whose elements
        depend on where they stand, unless they number rows that are sharded too.
        """

        def place(dims: tuple) -> Placement:
            carry = [d for d, n in enumerate(dims) if self._has_batch(n)]
            if len(carry) > 1 or (carry and not _divides(node)):
                self.conflicts.append(Conflict(node, "it numbers the examples of a batch"))
            if not carry:
                return REPLICATED
            uniform = node.target in UNIFORM or node.target in COUNTS
            merged = uniform and dims[carry[0]] != self.symbol
            return _placed(carry[0], _ANY if merged else 1)

        dims = node.meta["dims"]
        if isinstance(node.meta["val"], (tuple, list)):
            return tuple(place(d) for d in dims)
        return place(dims)

    def _has_batch(self, size: Any) -> bool:
        return self.symbol in getattr(size, "free_symbols", ())

    def _apply(self, node: fx.Node, rule: Notation, tensors: list[fx.Node], places: list) -> None:
        places = [REPLICATED if i in rule.unread else p for i, p in enumerate(places)]
        split = [(i, *at) for i, p in enumerate(places) if (at := _lies(p))]
        sharded = {rule.inputs[i][dim] for i, dim, _ in split}
        partial = {i for i, p in enumerate(places) if p == PARTIAL}
        outers = {outer for _, _, outer in split} - {_ANY}
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
            self._convert(tensors[i])
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
            self.places[node] = self._made(node)
            return
        (index,) = sharded
        (outer,) = outers or {_ANY}
        outputs: list[Placement] = []
        for position, names in enumerate(rule.outputs):
            if index in names:
                outputs.append(_placed(names.index(index), outer))
            elif position in rule.kept:
                outputs.append(REPLICATED)
            elif rule.sums:
                outputs.append(PARTIAL)
            else:
                self._refuse(node, "it reduces over the examples of a batch, and not by a sum")
                return
        self._set(node, outputs)

    def _regroup(self, node: fx.Node, source: fx.Node, place: Placement) -> None:
        """A reshape that merges what stands before the batch with it, or parts them again."""
        dim, outer = _lies(place) or (0, _ANY)
        found = None
        if outer != _ANY:
            found = reshaped(shape_of(source), shape_of(node), dim, outer, self.size)
        else:
            sizes = node.meta["dims"]
            carry = [d for d, n in enumerate(sizes) if self._has_batch(n)]
            if len(carry) == 1:
                found = carry[0], 1 if sizes[carry[0]] == self.symbol else _ANY
        if found is None:
            self._refuse(node, "it mixes the examples of a batch")
        else:
            self._set(node, [_placed(*found)])

    @staticmethod
    def _linear_group(rule: Notation, partial: set[int]) -> frozenset[int]:
        return max(rule.linear, key=lambda g: len(g & partial), default=frozenset())

    def _convert(self, node: fx.Node) -> None:
        """The whole sum is needed: from the whole batch if that is all it depends on."""
        (self.reduced if node in self.learned else self.hoisted)[node] = None

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
        self.conflicts.append(Conflict(node, reason))
        self.places[node] = self._made(node)
