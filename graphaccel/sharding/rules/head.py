"""Find the head of a step: the part that runs once on the whole batch, after all forwards.

Some losses are not sums over examples: the square root of a mean, a ratio of sums, the similarity
of each example to each other. They are exact on a split batch if the part of the step from the
first such op to the loss, with its derivative, runs once on the values of all parts, between the
forwards and the backwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from torch import fx

MOST = 0.1
"""The largest share of a model's weights that its head may hold. The work of the head is not split
over microbatches or data ranks: with more of the model in it, little is left to split."""


def close(graph: fx.Graph, seeds: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The smallest head that contains `seeds`: what the forward computes from them, and the
    derivatives.

    No value outside of it is on a path between two of its nodes, so that it can run at once.
    """
    head: set[fx.Node] = set()
    after: set[fx.Node] = set()
    origins: set[str] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        chosen = node in seeds
        if is_backward(node):
            chosen = chosen or node.meta.get("origin") in origins
            chosen = chosen and not any(n in after for n in inputs)
        else:
            chosen = chosen or any(n in head for n in inputs)
            if chosen:
                origins.add(node.meta.get("origin", node.name))
        if chosen:
            head.add(node)
        elif any(n in head or n in after for n in inputs):
            after.add(node)
    return frozenset(head)


def share_of_weights(
    graph: fx.Graph,
    head: Collection[fx.Node],
    places: Mapping[fx.Node, Any],
    weights: Collection[str],
    replicated: Any,
) -> float:
    """The share of the model's weights that a head reads: elements, over all. weights:
    placeholders. places: of values (`sharding.rules.propagate`)."""
    read: set[fx.Node] = set()
    stack = [n for node in head for n in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in read or node in head or places.get(node, replicated) != replicated:
            continue
        read.add(node)
        stack += node.all_input_nodes
    sizes = {
        n: prod(n.meta["val"].shape)
        for n in graph.find_nodes(op="placeholder")
        if n.name in weights
    }
    total = sum(sizes.values())
    return sum(size for n, size in sizes.items() if n in read) / total if total else 0.0


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph is part of the backward."""
    return node.meta.get("phase") == "backward"
