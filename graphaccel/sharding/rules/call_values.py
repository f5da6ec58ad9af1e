"""Values (call, result index) of a joint graph, as the placement solver names and compares them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.capture.symbols import BATCH
from graphaccel.ir.calls import is_random
from graphaccel.ir.values import operands
from graphaccel.kernels.ops.experts import GRADIENT, GROUPED_MATMUL
from graphaccel.sharding.rules.ops import indexing
from graphaccel.sharding.rules.ops.factories import UNIFORM
from graphaccel.sharding.rules.shard import Placement, Shard

Value: TypeAlias = tuple[fx.Node, int]  # a call and which of its results
HELD = ("parameter", "buffer")
"""Kinds of inputs that are stored in a placement."""


def placed_calls(
    graph: fx.Graph,
    kinds: Mapping[fx.Node, GraphInput],
    outputs: Sequence[GraphOutput],
    free: Collection[fx.Node] | None = None,
) -> list[fx.Node]:
    """The calls that have a placement: all but those that every rank computes itself (`free`; as
    `free_nodes` finds them where not given) and the selection of one result of several."""
    if free is None:
        free = free_nodes(graph, kinds, mutated_buffers(outputs))
    return [
        n
        for n in graph.nodes
        if n.op == "call_function" and n.target is not operator.getitem and n not in free
    ]


def mutated_buffers(outputs: Sequence[GraphOutput]) -> frozenset[str]:
    """Names of the buffers that a step changes."""
    return frozenset(spec.name for spec in outputs if spec.kind == "buffer")


def free_nodes(
    graph: fx.Graph, kinds: Mapping[fx.Node, GraphInput], mutated: frozenset[str]
) -> set[fx.Node]:
    """Calls that depend only on the batch, constants and buffers that do not change: every rank
    computes them itself."""
    bound = {n for n, spec in kinds.items() if spec.kind in ("parameter", "tangent")}
    bound |= {n for n, spec in kinds.items() if spec.kind == "buffer" and spec.name in mutated}
    free = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        built = node.target in UNIFORM and node.meta["val"].is_floating_point()
        if is_random(node) or built or any(n in bound for n in node.all_input_nodes):
            bound.add(node)
        else:
            free.add(node)
    return free


def source_of(node: fx.Node) -> Value:
    """The call that computes a value, and the index among its results."""
    if node.target is operator.getitem:
        source, index = operands(node)
        built = [k for k, t in enumerate(source.meta["val"]) if isinstance(t, torch.Tensor)]
        return source, built.index(index)
    return node, 0


def tensor_of(value: Value) -> torch.Tensor:
    result = value[0].meta["val"]
    if isinstance(result, torch.Tensor):
        return result
    return [t for t in result if isinstance(t, torch.Tensor)][value[1]]


def looks(node: fx.Node) -> bool:
    """Whether a call is a view or a cast of its only tensor argument."""
    plain = node.target is torch.ops.aten._to_copy.default
    return len(node.all_input_nodes) == 1 and (plain or getattr(node.target, "is_view", False))


def splits_batch(value: Value, placement: Placement | None) -> bool:
    """Whether a shard splits the batch: it is of a dim with the batch in it, outermost."""
    if not isinstance(placement, Shard) or placement.outer > 1:
        return False
    node, position = value
    dims = node.meta.get("dims", ())
    if isinstance(node.meta["val"], (tuple, list)):
        dims = dims[position] if position < len(dims) else ()
    size = dims[placement.dim] if placement.dim < len(dims) else 0
    return BATCH in getattr(size, "free_symbols", ())


def shapes_of(node: fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in value)


def signature(node: fx.Node) -> tuple[Any, ...]:
    """A key that is equal for calls with the same strategies."""

    def seen(value: Any) -> Any:
        if isinstance(value, fx.Node):
            result = value.meta["val"]
            if isinstance(result, torch.Tensor):
                return ("tensor", result.dtype, tuple(result.shape), value.target in UNIFORM)
            return ("value",)
        if isinstance(value, (tuple, list)):
            return tuple(map(seen, value))
        return type(value), value

    if node.target in indexing.RULES or node.target in (GROUPED_MATMUL, GRADIENT):
        return (node.name,)  # their indices decide too
    named = tuple((name, seen(value)) for name, value in node.kwargs.items())
    return (node.target, seen(node.args), named, node.meta.get("dims"))
