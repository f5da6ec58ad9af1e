"""Split the bias off a matmul (`linear`, `addmm`) for patterns of fused ops that add a bias.

  pattern                      found                                   becomes
    %s = aten.add(%x, %bias)     %y = aten.linear(%a, %w, %bias)         %x = aten.linear(%a, %w)
    %z = aten.gelu(%s)           %z = aten.gelu(%y)                      %z = bias_gelu(%x, %bias)

So a pattern with `x + bias` matches `nn.Linear` and transformers' `Conv1D`, and its author need not
know of them. In 16 bits the matmul is rounded once more, before the bias, as in Megatron-LM's bias
+ GELU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.ir.match import Pattern
from graphaccel.kernels.spec import Fusion, T

aten = torch.ops.aten
MATMULS = ("linear", "addmm")
_STANDS_FOR = "matmul_without_bias"


def adds_bias(fusion: Fusion, pattern: Pattern) -> fx.Node | None:
    """The sum of an input, read only by it, and a bias of one dim; or None."""
    for node in pattern.graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        x, bias = node.args
        if not isinstance(bias, fx.Node) or {x.op, bias.op} != {"placeholder"}:
            continue
        spec, other = fusion.inputs.get(bias.name), fusion.inputs.get(x.name)
        if not isinstance(spec, T) or not isinstance(other, T) or spec.broadcast or spec.mask:
            continue
        if spec.indices == other.indices[-1:] and len(other.indices) > 1 and len(x.users) == 1:
            return node
    return None


def with_matmul(fusion: Fusion, pattern: Pattern, kind: str) -> Pattern | None:
    """The pattern with a matmul in place of a sum with a bias: "linear", or "addmm" and the reshape
    after it. None where the pattern adds no bias."""
    total = adds_bias(fusion, pattern)
    if total is None:
        return None
    graph, copies = fx.Graph(), {}
    x, bias = total.args
    assert isinstance(x, fx.Node)
    for node in pattern.graph.nodes:
        if node is x:
            parts = [graph.placeholder(f"{x.name}_{part}") for part in ("left", "right")]
        elif node is total:
            copies[node] = _insert_matmul(
                graph, kind, parts, copies[bias], list(node.meta["val"].shape)
            )
            copies[node].meta |= {"val": node.meta["val"], _STANDS_FOR: x.name}
        elif node.op == "output":
            graph.output(map_arg(node.args[0], lambda n: copies[n]))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    return Pattern(graph, pattern.numbers)


def _insert_matmul(
    graph: fx.Graph, kind: str, parts: list[fx.Node], bias: Any, size: list[int]
) -> Any:
    if kind == "linear":
        return graph.call_function(aten.linear.default, (*parts, bias))
    flat = graph.call_function(aten.addmm.default, (bias, *parts))
    return graph.call_function(aten.reshape.default, (flat, size))


def matmul_in(nodes: dict[fx.Node, fx.Node]) -> tuple[str, fx.Node] | None:
    """Of a match, pattern node → node: the input that stands for a matmul, and that matmul."""
    for pattern_node, node in nodes.items():
        if _STANDS_FOR in pattern_node.meta:
            return pattern_node.meta[_STANDS_FOR], node
    return None


def without_bias(graph: fx.Graph, matmul: fx.Node) -> fx.Node:
    """The same matmul without its bias, inserted at the graph's insertion point."""
    if matmul.target is aten.linear.default:
        return _like(graph, matmul, aten.linear.default, *matmul.args[:2])
    flat, size = matmul.args
    assert isinstance(flat, fx.Node)
    unbiased = _like(graph, flat, aten.mm.default, *flat.args[1:3])
    return _like(graph, matmul, aten.reshape.default, unbiased, size)


def _like(graph: fx.Graph, old: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values: Any = map_arg(args, lambda n: n.meta["val"])
    node.meta = {**old.meta, "val": target(*values)}
    return node
