"""Inductor's decompositions, and torch's min-cut between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """What Inductor decomposes calls into: op → a function of the call's arguments."""
    from torch._inductor.decomposition import select_decomp_table  # seconds

    return select_decomp_table()


def traced_decomposition(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], table: Mapping[Any, Any]
) -> fx.GraphModule | None:
    """A call as a graph of the calls that it is decomposed into, or None where it stays one call.

    args, kwargs: of the call, with fake tensors as values. The placeholders of the graph are the
    distinct tensors among them, in their order; it returns what the call returns.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        given = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        positional, named = pytree.tree_unflatten(given, spec)
        return target(*positional, **named)

    with torch.no_grad():
        built = make_fx(call, decomposition_table=dict(table))(*(flat[i] for i in places))
    calls = [n for n in built.graph.nodes if n.op == "call_function"]
    return None if any(n.target is target for n in calls) else built


def min_cut(
    graph: fx.Graph, backward: Collection[fx.Node], results: Collection[fx.Node]
) -> set[fx.Node]:
    """The values of the forward that are best saved for the backward: what is not among them is
    cheaper to compute from them in the backward than to write and read.

    graph: of calls with fake `meta["val"]`. backward: its calls that belong to the backward.
    results: what the forward returns. A node with `meta["recompute"]` = MUST_SAVE is saved if the
    backward needs it.
    """
    from torch._functorch.partitioners import NodeInfo, OrderedSet, choose_saved_values_set

    later = set(backward)
    needed: set[fx.Node] = set()
    stack = [n for n in results if n not in later]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    forward = [n for n in graph.nodes if n in needed]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    required = OrderedSet([*forward, *(n for n in inputs if n not in needed)])
    other = [n for n in graph.nodes if n not in required and n not in later and n.op != "output"]
    facts = {
        "inputs": inputs,
        "_required_fw_nodes": required,
        "required_bw_nodes": OrderedSet(n for n in graph.nodes if n in later),
        "tangents_closure": OrderedSet(n for n in graph.nodes if n in later),
        "unclaimed_nodes": OrderedSet(other),
        "fw_order": {n: i for i, n in enumerate(required)},
        "static_lifetime_input_nodes": OrderedSet(),
    }
    known = {f.name for f in fields(NodeInfo)}
    far = int(1e9)
    for node in reversed(graph.nodes):
        distance = 0 if node in later else far
        if node.op != "output" and node in required:
            distance = min([far, *(user.dist_from_bw + 1 for user in node.users)])
        node.dist_from_bw = distance
    info = NodeInfo(**{name: value for name, value in facts.items() if name in known})
    return set(choose_saved_values_set(graph, info))


def must_save() -> Any:
    """The value of `meta["recompute"]` by which `min_cut` saves a node."""
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE
