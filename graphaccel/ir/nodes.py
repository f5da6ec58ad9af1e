"""Fast creation and copying of many FX nodes, and dead-code elimination."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

# Assignment to `args` and `kwargs` without re-inserting the node in its graph's lookup table, which
# takes longer, and is for targets that change.
_set_args, _set_kwargs = fx.Node.args.__set__, fx.Node.kwargs.__set__  # type: ignore[attr-defined]


def new_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None,
    meta: Mapping[str, Any],
) -> fx.Node:
    """Like `graph.create_node`, for arguments without symbolic integers: it looks for those in
    every argument of every call, which takes longer than the rest."""
    node = graph.create_node(op, target, name=name)
    if args:
        _set_args(node, args)
    if kwargs:
        _set_kwargs(node, kwargs)
    node.meta.update(meta)
    return node


def copy_node(graph: fx.Graph, node: fx.Node, built: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Like `graph.node_copy`. made: the copies of the node's inputs."""
    args: Any = fx.map_arg(node.args, built.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, built.__getitem__) if node.kwargs else {}
    return new_node(graph, node.op, node.target, args, kwargs, node.name, node.meta)


def copy_nodes(graph: fx.Graph, source: fx.Graph, built: dict[fx.Node, fx.Node]) -> list[Any]:
    """Like `graph.graph_copy`: what the source returns. made: receives the copy of each node."""
    for node in source.nodes:
        if node.op == "output":
            returned: Any = fx.map_arg(node.args[0], built.__getitem__)
            return list(returned)
        built[node] = copy_node(graph, node, built)
    raise AssertionError("a graph without an output")


def drop_dead(graph: fx.Graph) -> None:
    """Like `graph.eliminate_dead_code`, for graphs that are known to be valid and contain only
    function calls: torch's version checks that, and tests the purity of every node, read or not."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
