"""Every call of a joint graph gives a new value: none writes over one that exists.

before                                              after
  %e: f64[8,5] = aten.empty_like(%x)                  %e: f64[8,5] = aten.empty_like(%x)
  %b: f64[8,5] = aten.bernoulli_.float(%e, 0.9)       %b: f64[8,5] = aten.bernoulli.p(%e, 0.9)
  %d: f64[8,5] = aten.div_.Scalar(%b, 0.9)            %d: f64[8,5] = aten.div.Scalar(%b, 0.9)
  %s: = aten.unsafe_split(%g, 16, 1)                  %s: = aten.split.Tensor(%g, 16, 1)

What torch does inside of one op (the cells of an LSTM, the dropout of attention, the gradient of
label smoothing) saves memory so. In a graph a call may be cloned (recompute), moved to another
stage, or cut over devices, and a second write over the same memory would be a second addition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.compat.torch import is_view, written_arguments

aten = torch.ops.aten

# Where the name without its underscore is another's.
_OTHERS = MappingProxyType(
    {aten.bernoulli_.float: aten.bernoulli.p, aten.transpose_.default: aten.transpose.int}
)
_SPLITS = MappingProxyType(
    {
        aten.unsafe_split.Tensor: aten.split.Tensor,
        aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    }
)


class SharedWrite(Exception):
    """A call writes over memory that another value, read later, looks at."""


def without_writes(graph: fx.GraphModule) -> None:
    """Rewrite a joint graph with `meta["val"]` on every call, in place.

    Raises SharedWrite.
    """
    place = {node: i for i, node in enumerate(graph.graph.nodes)}
    looks: dict[fx.Node, fx.Node] = {}  # a view → whose memory it looks at
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
            if is_view(node):
                source = node.all_input_nodes[0]
                looks[node] = looks.get(source, source)
            continue
        (over,) = written
        target = _functional(node)
        owner = looks.get(over, over)
        shared = [v for v in (owner, *(v for v, o in looks.items() if o is owner)) if v is not over]
        read = any(place[user] > place[node] for value in shared for user in value.users)
        only_seen = torch.Tag.inplace_view in node.target.tags  # `transpose_` writes nothing
        if only_seen:
            looks[node] = owner
        if target is None or (read and not only_seen):
            raise SharedWrite(str(node.target))
        _replace(node, over, target, place)


def _functional(node: fx.Node) -> Callable[..., Any] | None:
    """The op that gives what another writes over its first argument."""
    if node.target in _OTHERS:
        return _OTHERS[node.target]
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    packet = getattr(aten, name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    wanted = _types(node.target)
    named = [overload, *(other for other in packet.overloads() if other != overload)]
    found = (getattr(packet, other, None) for other in named)  # `pow_.Scalar`: `pow.Tensor_Scalar`
    return next((op for op in found if op is not None and _types(op) == wanted), None)


def _types(op: Any) -> list[tuple[str, str]]:
    """Name and type of each argument; the memory that it may write is no part of its type."""
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def _replace(
    node: fx.Node, over: fx.Node, target: Callable[..., Any], place: dict[fx.Node, int]
) -> None:
    """The call as one that writes nothing; who reads `over` after it reads its result."""
    if len(node.args) == 1 and target is aten.bernoulli.p:
        node.args = (over, 0.5)  # only the one that writes has a default
    node.target = target
    kept = over.meta["val"]
    values: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    made = target(*values[0], **values[1])
    new = node
    node.meta["val"] = made
    if made.dtype != kept.dtype:  # in place, the dtype is that of what is written over
        with node.graph.inserting_after(node):
            new = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": kept.dtype})
        new.meta = {**node.meta, "val": made.to(kept.dtype)}
        place[new] = place[node]
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    over.replace_all_uses_with(new, delete_user_cb=lambda user: place[user] > place[node])
