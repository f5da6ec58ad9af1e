"""Inserts fused ops, or the calls of a rewrite, in place of their matches."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from graphaccel.capture.canonical.causal import causal_attention
from graphaccel.capture.patterns import trace_pattern
from graphaccel.kernels.spec import Function
from graphaccel.passes.fusion.matmul_bias import without_bias
from graphaccel.passes.fusion.site import Site, op_of_site, rewrite_of

aten = torch.ops.aten
_LAYOUTS = {aten.transpose.int, aten.permute.default}
_COPIES = {aten.reshape.default, aten.clone.default, aten.contiguous.default}


def insert(graph: fx.Graph, site: Site, moved: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Insert a fused op (or the calls of a rewrite) in place of its match.

    moved: replacements of nodes that other sites replaced. Returns the replacements of this site.
    """
    inputs = {n: moved.get(v, v) if isinstance(v, fx.Node) else v for n, v in site.inputs.items()}
    site = replace(site, inputs=inputs)
    order = {n: i for i, n in enumerate(graph.nodes)}
    sources = [v for v in site.inputs.values() if isinstance(v, fx.Node)]
    inside = set(site.inside)
    users = [u for o in site.outputs for u in o.users if u not in inside]
    last_input = max((order[n] for n in sources), default=-1)
    anchor = max(site.outputs, key=lambda n: order[n])
    first_user = min((order[u] for u in users), default=len(order))
    before = (
        anchor
        if order[anchor] < first_user
        else next(n for n, i in order.items() if i > last_input and n.op != "placeholder")
    )
    covers = tuple(n.name for n in site.inside)
    with graph.inserting_before(before):
        if site.matmul is not None:
            name, matmul = site.matmul
            site = replace(site, inputs={**site.inputs, name: without_bias(graph, matmul)})
        inserted = _insert_calls(graph, site)
    for node in inserted.new:
        for key in ("nn_module_stack", "stack_trace"):
            if key in anchor.meta:
                node.meta[key] = anchor.meta[key]
        node.meta["made_by"] = f"fuse {site.fusion.name}"
    for old, new in zip(site.outputs, inserted.outputs, strict=True):
        old.replace_all_uses_with(new, delete_user_cb=lambda u: u not in inside)
    replacements = dict(zip(site.outputs, inserted.outputs, strict=True))
    names = {new: old.name for old, new in replacements.items()}
    for node in sorted(inside, key=lambda n: -order[n]):
        graph.erase_node(node)
    for new, name in names.items():
        new.name = name
    inserted.main.meta["covers"] = covers
    return replacements


@dataclass
class _Inserted:
    """main: the call that stands for the fusion."""

    new: list[fx.Node]
    outputs: list[fx.Node]
    main: fx.Node


def _insert_calls(graph: fx.Graph, site: Site) -> _Inserted:
    values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in site.inputs.values()]
    if site.fusion.rewrite is not None:
        return _insert_rewrite(graph, site)
    op = op_of_site(site)
    call = graph.call_function(op, tuple(site.inputs.values()))
    call.meta["val"] = op(*values)
    items = [call]
    if not isinstance(call.meta["val"], Tensor):
        items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(site.outputs))]
        for i, item in enumerate(items):
            item.meta["val"] = call.meta["val"][i]
    outputs = list(items)
    for i, (item, old) in enumerate(zip(items, site.outputs, strict=True)):
        kind = old.meta["val"].dtype
        if item.meta["val"].dtype != kind:  # `mismatch` allowed it
            outputs[i] = graph.call_function(aten._to_copy.default, (item,), {"dtype": kind})
            outputs[i].meta["val"] = item.meta["val"].to(kind)
    return _Inserted(list(dict.fromkeys((call, *items, *outputs))), outputs, call)


def _insert_rewrite(graph: fx.Graph, site: Site) -> _Inserted:
    """The calls of a rewrite, traced at the shapes of the match."""
    rewrite = rewrite_of(site)
    assert rewrite is not None
    values = {n: v.meta["val"] if isinstance(v, fx.Node) else v for n, v in site.inputs.items()}
    traced = trace_pattern(_of_tensors(rewrite, values), values)
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            copies[node] = site.inputs[node.name]
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            arguments = map_arg(
                (copies[node].args, dict(copies[node].kwargs)), lambda n: n.meta["val"]
            )
            copies[node].meta = {"val": node.target(*arguments[0], **arguments[1])}
            if node.target is aten.scaled_dot_product_attention.default:
                causal_attention(copies[node])
    new = [m for n, m in copies.items() if n.op == "call_function"]
    outputs = []
    for output, old in zip(traced.outputs, site.outputs, strict=True):
        node = copies[output]
        if node.meta["val"].stride() != old.meta["val"].stride():  # `mismatch` allowed it
            node = graph.call_function(
                aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
            node.meta["val"] = old.meta["val"]
            new.append(node)
        outputs.append(node)
    return _Inserted(new, outputs, copies[traced.outputs[-1]])


def _of_tensors(function: Function, values: Mapping[str, Any]) -> Function:
    """The function of its tensor arguments alone, by name; numbers and absent ones are fixed."""
    import inspect

    names = [n for n, v in values.items() if isinstance(v, Tensor)]
    fixed = {n: v for n, v in values.items() if n not in names}

    def call(**tensors: Tensor) -> Any:
        return function(**fixed, **tensors)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    )
    return call


def remove_layout_copies(graph: fx.Graph) -> None:
    """Remove layout copies, inserted with the fused ops, that only views read from which the next
    op makes the same tensor anyway (attention's output, whose heads are concatenated)."""
    for node in list(graph.nodes):
        if node.target is not aten.clone.default or "fuse" not in node.meta.get("made_by", ""):
            continue
        source = node.all_input_nodes[0]
        values = _read_through(node, {node: source.meta["val"]})
        if values is None:
            continue
        for view, value in values.items():
            view.meta["val"] = value
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _read_through(copy: fx.Node, known: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor] | None:
    """Values of the views after a copy if it were removed; None where some reader depends on it."""
    stack = [copy]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.target not in _LAYOUTS | _COPIES or user.all_input_nodes != [node]:
                return None
            value = user.target(known[node], *user.args[1:], **user.kwargs)
            if user.target in _LAYOUTS:
                known[user] = value
                stack.append(user)
            elif value.stride() != user.meta["val"].stride():
                return None
    del known[copy]
    return known
