"""Replace calls of the joint graph by the simpler ones that Inductor would make of them.

before                                              after
  %y: = aten.gelu(%x)                # forward        %a: = aten.mul(%x, 0.707...)     # forward
                                                      %b: = aten.erf(%a)               # forward
                                                      ...
  %d: = aten.gelu_backward(%g, %x)   # backward       %e: = aten.mul(%x, 0.707...)     # backward

What a simple call computes can be fused with its neighbours, and computed a second time for the
backward: `choose_saved` decides which of these values are saved, one by one. Casts, matmuls,
random draws, collectives and fused ops stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.partition import decompositions, traced_decomposition
from graphaccel.ir.calls import is_random
from graphaccel.sharding.rules.ops.collectives import is_message

aten = torch.ops.aten
_KEPT = {
    aten._to_copy.default,  # other passes look for casts of parameters
    aten.embedding_dense_backward.default,
    aten.addmm.default,
    aten.mm.default,
    aten.bmm.default,
}


def decompose(graph: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a joint graph in place; values may differ by rounding."""
    table = {op: run for op, run in decompositions().items() if op not in _KEPT}
    mode = fake_mode_of(list(graph.graph.nodes))
    known: dict[Hashable, fx.GraphModule | None] = {}
    for node in list(graph.graph.nodes):
        if node.target not in table or is_random(node) or is_message(node.target):
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        key = (node.target, _key(node))
        if key not in known:
            with mode:
                known[key] = traced_decomposition(node.target, args, kwargs, table)
        built = known[key]
        if built is not None and not built.graph.find_nodes(op="get_attr"):
            _splice(node, built.graph)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph


def _key(node: fx.Node) -> Hashable:
    """What the decomposition of a call depends on."""

    def shown(value: fx.Node) -> Any:
        own = value.meta["val"]
        return f"{own.dtype} {tuple(own.shape)} {own.stride()} {own.device}"

    order = {n: i for i, n in enumerate(node.all_input_nodes)}
    layouts = [shown(n) if isinstance(n.meta["val"], torch.Tensor) else str(n) for n in order]
    places = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"<{order[n]}>")
    return repr(places), tuple(layouts)


def _splice(node: fx.Node, built: fx.Graph) -> None:
    """Put the calls of a decomposition in the place of a call."""
    tensors: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), tensors.append)
    inputs = built.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(inputs, tensors, strict=True))
    meta = {k: v for k, v in node.meta.items() if k not in ("val", "dims", "shares", "covers")}
    with node.graph.inserting_before(node):
        for call in built.nodes:
            if call.op == "call_function":
                copies[call] = node.graph.node_copy(call, lambda n: copies[n])
                copies[call].meta = {**meta, "val": call.meta["val"], "made_by": "decompose"}
    results: Any = fx.map_arg(built.output_node().args[0], lambda n: copies[n])
    _replace(node, results)


def _replace(node: fx.Node, results: Any) -> None:
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            if user.target is operator.getitem:
                result = results[user.args[1]]
                if result is not None:
                    user.replace_all_uses_with(result)
                node.graph.erase_node(user)
    assert isinstance(node.meta, Mapping)
    if not node.users:
        node.graph.erase_node(node)
