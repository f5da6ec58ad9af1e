"""Make a graph this rank's: the names of its groups, its place on each axis, and the form of
collectives that its transport can take."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphaccel.runtime.mesh import Mesh, axes_of

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_SEVERAL = _c10d.all_gather_into_tensor_coalesced.default
_GATHERS = frozenset({_c10d.all_gather_into_tensor.default, _SEVERAL})


def bind(graph: fx.GraphModule, mesh: Mesh) -> None:
    """Give collectives the names of groups, and arguments that depend on the rank their values.

    A collective's last argument is an axis. `meta["bind"]`: {position: (axis, multiplier)}: that
    argument becomes this rank's coordinate on the axis, times the multiplier.
    """
    changed = False
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        args = list(node.args)
        if args and axes_of(args[-1]):
            args[-1] = mesh.group(args[-1]).group_name
        for position, (axis, multiplier) in node.meta.get("bind", {}).items():
            args[position] = mesh.coordinate(axis) * multiplier
        if args != list(node.args):
            node.args = tuple(args)
            changed = True
        if node.target in _GATHERS and mesh.device.type == "cpu":
            _gather_into_own(node)
            changed = True
    if changed:
        graph.recompile()


def _gather_into_own(node: fx.Node) -> None:
    """Gather into memory that is made before.

    The functional all-gather goes through gloo's coalesced one, which writes over freed memory
    where several are on their way (torch 2.13: "malloc(): unaligned tcache chunk detected");
    this form goes through another.
    """
    parts, ranks, group = node.args
    if node.target is not _SEVERAL:
        node.replace_all_uses_with(_into_own(node, parts, ranks, group, node.meta["val"]))
    else:
        values: Sequence[Any] = node.meta["val"]
        for user in list(node.users):
            assert user.target is operator.getitem
            place = user.args[1]
            made = _into_own(node, parts[place], ranks, group, values[place])
            user.replace_all_uses_with(made)
            user.graph.erase_node(user)
    node.graph.erase_node(node)


def _into_own(node: fx.Node, part: fx.Node, ranks: int, group: str, value: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        place = node.graph.call_function(aten.new_empty.default, (part, list(value.shape)))
        made = node.graph.call_function(
            _c10d.all_gather_into_tensor_out.default, (part, ranks, group), {"out": place}
        )
    for new in (place, made):
        new.meta = {**node.meta, "val": value}
    return made
