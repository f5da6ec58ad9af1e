"""Many nodes made at once, and dead ones dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

# What assigning to `args` and `kwargs` comes to, without entering the node in its graph's lookup
# again: that takes longer, and is for targets that change.
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
    """As `graph.create_node`, for arguments without symbolic integers: that looks for them in every
    argument of every call, which takes longer than the rest."""
    node = graph.create_node(op, target, name=name)
    if args:
        _set_args(node, args)
    if kwargs:
        _set_kwargs(node, kwargs)
    node.meta.update(meta)
    return node


def copy_node(graph: fx.Graph, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """As `graph.node_copy`. made: the copies of what it reads."""
    args: Any = fx.map_arg(node.args, made.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, made.__getitem__) if node.kwargs else {}
    return new_node(graph, node.op, node.target, args, kwargs, node.name, node.meta)


def copy_nodes(graph: fx.Graph, source: fx.Graph, made: dict[fx.Node, fx.Node]) -> list[Any]:
    """As `graph.graph_copy`: what the source returns. made: told the copy of each node."""
    for node in source.nodes:
        if node.op == "output":
            returned: Any = fx.map_arg(node.args[0], made.__getitem__)
            return list(returned)
        made[node] = copy_node(graph, node, made)
    raise AssertionError("a graph without an output")


def drop_dead(graph: fx.Graph) -> None:
    """As `graph.eliminate_dead_code`, of a graph that is known to be in order and calls functions
    alone: that checks it, and asks of every node, read or not, whether it may go."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
