"""Reads, inserts and replaces single calls of a forward graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.compat.torch.ops import schema


def replace_call(node: fx.Node, value: Any) -> None:
    """Pass a value to the readers of a call, and remove the call."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def emit(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node just before `before`, with its provenance and a fake value."""
    graph = before.graph
    with graph.inserting_before(before):
        new = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if key in before.meta:
            new.meta[key] = before.meta[key]
    new.meta["made_by"] = "canonicalise"
    inputs: Any = map_arg((args, kwargs), lambda n: n.meta["val"])
    value = target(*inputs[0], **inputs[1])
    if isinstance(value, torch.Tensor):
        # A fake view refers to its base, which cannot be sent to other ranks.
        value = value.new_empty_strided(value.shape, value.stride())
    new.meta["val"] = value
    return new


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by schema name, defaults filled in."""
    passed = dict(zip((a.name for a in schema(node)), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: passed.get(a.name, a.default_value) for a in schema(node)}


def with_arguments(node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
    """A call of the same op just before `node`, with these values for all its arguments."""
    named = {a.name for a in schema(node) if a.kwarg_only}
    values = [value for name, value in arguments.items() if name not in named]
    keywords = {name: value for name, value in arguments.items() if name in named}
    return emit(node, node.target, *values, **keywords)
