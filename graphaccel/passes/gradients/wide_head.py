"""Give a fused head and loss its weight in float32, which it casts where it reads it.

before                                                after
  %c: bf16[v,h] = aten._to_copy(%w)     # forward
  %l = graphaccel.linear_cross_entropy(%x, %c)          %l = graphaccel.linear_cross_entropy(%x, %w)
  %d: bf16[v,h] = getitem(%l, 2)                        %d: f32[v,h] = getitem(%l, 2)
  %s: bf16[v,h] = aten.mul(%d, %f)      # backward      %s: f32[v,h] = aten.mul(%d, %f)
  %g: f32[v,h] = aten._to_copy(%s)                      return (%s)
  return (%g)

On a GPU the op pads the weight to whole rows of 16 bytes, and sums its gradient in float32: the
cast goes straight into the padded copy, and the sum is the gradient.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from graphaccel.kernels.ops.linear_cross_entropy import linear_cross_entropy
from graphaccel.kernels.register import op_of
from graphaccel.planner.profile.cost import RESHAPES, TRANSPOSES

aten = torch.ops.aten
_HEAD = op_of(linear_cross_entropy)
_WEIGHT, _OF_PARAMETERS = 1, (2, 3)  # the argument, and the results that are gradients of it


def wide_head(graph: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a joint graph in place."""
    for node in graph.graph.find_nodes(op="call_function", target=_HEAD):
        _widen(node)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph


def _widen(head: fx.Node) -> None:
    cast = head.args[_WEIGHT]
    assert isinstance(cast, fx.Node)
    if cast.target is not aten._to_copy.default:
        return
    source = cast.all_input_nodes[0]
    low = cast.meta["val"].dtype in (torch.bfloat16, torch.float16)
    if source.meta["val"].dtype != torch.float32 or not low:
        return
    parts = [u for u in head.users if u.target is getitem and u.args[1] in _OF_PARAMETERS]
    chains = [_until_cast(p) for p in parts if p.users]
    if not all(chains):  # something reads a gradient in 16 bits
        return
    head.update_arg(_WEIGHT, source)
    outputs = list(head.meta["val"])
    for index in _OF_PARAMETERS:
        outputs[index] = outputs[index].to(torch.float32)
    head.meta["val"] = type(head.meta["val"])(outputs)
    for *scaled, last in chains:
        for node in scaled:
            node.meta["val"] = node.meta["val"].to(torch.float32)
        last.replace_all_uses_with(scaled[-1])
        last.graph.erase_node(last)


def _until_cast(node: fx.Node) -> list[fx.Node]:
    """A gradient, what only scales or reshapes it, each read once, and its cast to float32; empty
    where that is not all."""
    chain = [node]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        chain.append(user)
        if user.target is aten._to_copy.default:
            return chain if user.meta["val"].dtype == torch.float32 else []
        plain = user.target is aten.mul.Tensor and user.args[0] is chain[-2]
        if not (plain or user.target in RESHAPES or user.target in TRANSPOSES):
            return []
    return []
