"""The size of the terms that a new buffer is a sum of: what its rounding is relative to.

A running mean of values that a BatchNorm has centred is mathematically zero. What two orders of
summation leave of it differs by as much as it is itself, but by little relative to the mean of the
absolute values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.compat.torch.ops import is_view
from graphaccel.ir.calls import arguments
from graphaccel.ir.values import operands

aten = torch.ops.aten

Run = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]
"""A node and values of its inputs → its value."""

_REDUCTIONS = frozenset({aten.mean.dim, aten.mean.default, aten.sum.dim_IntList, aten.sum.default})
_SCALED = frozenset(
    {
        aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default,
        aten._to_copy.default, aten.clone.default, aten.reshape.default, aten.flip.default,
    }
)  # fmt: skip
"""Ops for which |op(a, b)| = |op(|a|, |b|)|."""
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.lerp.Scalar})
_NORM = aten._native_batch_norm_legit_functional.default
_MEAN = 3
"""Which output of `_NORM` is the new running mean."""


class Magnitudes:
    """Computed beside a run of a graph, for the nodes in `wanted`: sums of absolute values.

    A node is followed backwards through sums and scalings to the inputs of reductions, and the
    absolute values of those are reduced in the same way. found: results, for nodes that are such a
    sum; of the shape of the node.
    """

    def __init__(self, graph: fx.Graph, wanted: Iterable[Any]) -> None:
        self.found: dict[fx.Node, Tensor] = {}
        self._wanted = {n for n in wanted if isinstance(n, fx.Node) and _is_followed(n, False)}
        self._followed: set[fx.Node] = set()
        self._uses: dict[fx.Node, int] = {}
        self._values: dict[fx.Node, Any] = {}
        if self._wanted:
            self._follow(_that_reduce(graph))

    def see(self, node: fx.Node, value: Any, run: Run) -> None:
        """The next node of the run, with its value."""
        if node in self._followed:
            value = self._magnitude(node, run)
            if node in self._wanted:
                self.found[node] = value
            for source in node.all_input_nodes:
                self._uses[source] -= 1
                if not self._uses[source]:
                    del self._values[source]
        if self._uses.get(node):
            self._values[node] = value

    def _follow(self, reduce: Mapping[bool, set[fx.Node]]) -> None:
        self._wanted &= reduce[False]
        stack = [(node, False) for node in self._wanted]
        while stack:
            node, within = stack.pop()
            if node in self._followed:
                continue
            self._followed.add(node)
            within = within or node.target in _REDUCTIONS
            for source in node.all_input_nodes:
                self._uses[source] = self._uses.get(source, 0) + 1
                if source in reduce[within]:
                    stack.append((source, within))

    def _magnitude(self, node: fx.Node, run: Run) -> Tensor:
        if node.target is operator.getitem:
            norm = operands(node)[0]
            return _of_norm(norm, self._values[norm])
        given = {n: _absolute(self._values[n]) for n in node.all_input_nodes}
        return _of_sum(node, given) if node.target in _SUMS else run(node, given).abs()


def _that_reduce(graph: fx.Graph) -> dict[bool, set[fx.Node]]:
    """Nodes that are followed to a reduction: behind another one, or not."""
    results: dict[bool, set[fx.Node]] = {False: set(), True: set()}
    for node in graph.nodes:
        for within, those in results.items():
            ends = node.target in _REDUCTIONS or node.target is operator.getitem
            if _is_followed(node, within) and (ends or those & set(node.all_input_nodes)):
                those.add(node)
    return results


def _is_followed(node: fx.Node, within: bool) -> bool:
    """within: behind a reduction, where only scaled values and further reductions are followed."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source, item = operands(node)
        return not within and source.target is _NORM and item == _MEAN
    if node.target in _REDUCTIONS or node.target in _SCALED or is_view(node):
        return True
    return not within and node.target in _SUMS


def _of_sum(node: fx.Node, given: Mapping[fx.Node, Any]) -> Tensor:
    named = {
        k: given.get(v, v) if isinstance(v, fx.Node) else v for k, v in arguments(node).items()
    }
    if node.target is aten.lerp.Scalar:
        weight = named["weight"]
        return named["self"] * abs(1 - weight) + named["end"] * abs(weight)
    other = named["other"]
    return named["self"] + abs(other) * abs(named["alpha"])


def _of_norm(norm: fx.Node, values: Any) -> Tensor:
    """Of the new running mean: the mean of absolute values is at most the root of the mean square,
    which the batch's statistics give."""
    _, mean, inverse, after, _ = values
    square = mean.square() + inverse.square().reciprocal()
    return after.abs() + abs(arguments(norm)["momentum"]) * square.sqrt()


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value
