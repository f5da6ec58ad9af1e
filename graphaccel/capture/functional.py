"""Functionalise a joint graph: replace in-place calls by calls that return a new value.

before                                              after
  %e: f64[8,5] = aten.empty_like(%x)                  %e: f64[8,5] = aten.empty_like(%x)
  %b: f64[8,5] = aten.bernoulli_.float(%e, 0.9)       %b: f64[8,5] = aten.bernoulli.p(%e, 0.9)
  %d: f64[8,5] = aten.div_.Scalar(%b, 0.9)            %d: f64[8,5] = aten.div.Scalar(%b, 0.9)
  %s: = aten.unsafe_split(%g, 16, 1)                  %s: = aten.split.Tensor(%g, 16, 1)

Torch writes in place inside of some ops (the cells of an LSTM, the dropout of attention, the
gradient of label smoothing) to save memory. In a graph a call may be cloned (recompute), moved to
another stage, or sharded, and a second write to the same memory would then be a second addition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.compat.torch.ops import is_view, written_arguments
from graphaccel.ir.nodes import drop_dead

aten = torch.ops.aten

# Ops whose name without the underscore is that of another op.
_OTHERS: Mapping[Any, Any] = MappingProxyType(
    {aten.bernoulli_.float: aten.bernoulli.p, aten.transpose_.default: aten.transpose.int}
)
_SPLITS = MappingProxyType(
    {
        aten.unsafe_split.Tensor: aten.split.Tensor,
        aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    }
)


class SharedWrite(Exception):
    """A call writes in place over memory of another value that is read later."""


def without_writes(graph: fx.GraphModule) -> None:
    """Rewrite a joint graph with `meta["val"]` on every call, in place.

    Raises SharedWrite.
    """
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    looks: dict[fx.Node, fx.Node] = {}  # view → the owner of its storage
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SPLITS:
            node.target = _SPLITS[node.target]
            continue
        if node.target is operator.getitem and node.args[0] in looks:
            looks[node] = looks[node.args[0]]
            continue
        written = written_arguments(node)
        if not written:
            if node.target is aten._conj.default and not node.all_input_nodes:
                _replace_by_number(node, complex(node.args[0]).conjugate())
            elif is_view(node):
                source: fx.Node = node.all_input_nodes[0]
                looks[node] = looks.get(source, source)
            continue
        (over,) = written
        target = _functional(node)
        owner = looks.get(over, over)
        shared = [v for v in (owner, *(v for v, o in looks.items() if o is owner)) if v is not over]
        read = any(place[user] > place[node] for value in shared for user in value.users)
        only_seen = torch.Tag.inplace_view in node.target.tags  # `transpose_` writes no data
        if only_seen:
            looks[node] = owner
        if target is None or (read and not only_seen):
            raise SharedWrite(str(node.target))
        _replace(node, over, target, place)
    drop_dead(graph.graph)  # a write that nobody reads was kept for its effect


def _functional(node: fx.Node) -> Callable[..., Any] | None:
    """The op that returns what an in-place op writes to its first argument."""
    if node.target in _OTHERS:
        return _OTHERS[node.target]
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    packet = getattr(aten, name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    wanted = _types(node.target)
    named = [overload, *(other for other in packet.overloads() if other != overload)]
    result = (getattr(packet, other, None) for other in named)  # `pow_.Scalar`: `pow.Tensor_Scalar`
    return next((op for op in result if op is not None and _types(op) == wanted), None)


def _types(op: Any) -> list[tuple[str, str]]:
    """Name and type of each argument; aliasing is not part of the type."""
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def _replace(
    node: fx.Node, over: fx.Node, target: Callable[..., Any], place: dict[fx.Node, int]
) -> None:
    """Make the call out of place; later readers of `over` read its result instead."""
    if len(node.args) == 1 and target is aten.bernoulli.p:
        node.args = (over, 0.5)  # only the in-place op has a default
    node.target = target
    kept = over.meta["val"]
    values: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    built = target(*values[0], **values[1])
    new = node
    node.meta["val"] = built
    if built.dtype != kept.dtype:  # in place, the dtype of the destination stays
        with node.graph.inserting_after(node):
            new = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": kept.dtype})
        new.meta = {**node.meta, "val": built.to(kept.dtype)}
        place[new] = place[node]
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    over.replace_all_uses_with(new, delete_user_cb=lambda user: place[user] > place[node])


def _replace_by_number(node: fx.Node, number: complex) -> None:
    """A number of the user's code, which torch conjugates as a tensor in the backward."""
    for user in list(node.users):
        user.args, user.kwargs = map_arg(
            (user.args, user.kwargs), lambda n: number if n is node else n
        )
    node.graph.erase_node(node)
