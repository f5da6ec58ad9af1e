"""Find the values of a graph that are replicated over a mesh axis (the same on all its ranks).

Ranks run the same graph on the same batch, so values differ only through a sharded parameter, a
number that depends on a rank's coordinate (meta "bind", `sharding.apply.graph_builder`), or a
collective that gives each rank its part.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

_c10d = torch.ops._c10d_functional
_GIVES_ALL = frozenset({_c10d.all_reduce.default, _c10d.all_gather_into_tensor.default})


def replicated(graph: fx.Graph, axis: str, sharded: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose value is the same on all ranks of `axis`. sharded: inputs that are not."""
    equal_nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            same = node not in sharded
        elif node.args and _over(node.args[-1], axis):  # a collective over it
            same = node.target in _GIVES_ALL
        else:
            described = node.meta.get("bind", {}).values()
            bound = any(axis in name.split("+") for name, _ in described)
            same = not bound and all(n in equal_nodes for n in node.all_input_nodes)
        if same:
            equal_nodes.add(node)
    return equal_nodes


def _over(argument: object, axis: str) -> bool:
    return isinstance(argument, str) and axis in argument.split("+")
