"""Let matmuls return gradients of weights in float32, where they would be cast to it.

before                                            after
  %g: bf16[64,32] = aten.mm(%a, %b)                 %g: f32[64,32] = graphaccel.wide_product(
  %c: f32[64,32] = aten._to_copy(%g, dtype=f32)         %a, %b)
  return (%c)                                       return (%g)

A matmul of 16-bit matrices sums in float32 on every device; on a GPU it can also write that sum.
That saves a pass over the gradient, and the rounding.
"""

from __future__ import annotations

import torch
from torch import fx

from graphaccel.ir.program import StageProgram
from graphaccel.ir.values import operands, returned
from graphaccel.kernels.accumulate import WIDE_PRODUCT
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import RESHAPES, TRANSPOSES

aten = torch.ops.aten


def wide_gradients(program: StageProgram, plan: Plan) -> StageProgram:
    """Rewrite the backward of a program in place, where the plan has kernels made for a GPU."""
    if not plan.min_cut:
        return program
    for graph in program.backwards.values():
        for value, node in zip(program.backward_outputs, returned(graph), strict=True):
            if value.kind == "gradient" and isinstance(node, fx.Node):
                _widen(node)
        graph.graph.lint()
        graph.recompile()
    return program


def _widen(cast: fx.Node) -> None:
    """Exchange the matmul behind a cast and views, if nothing else reads them."""
    if cast.target is not aten._to_copy.default or cast.meta["val"].dtype != torch.float32:
        return
    chain = [operands(cast)[0]]
    while chain[-1].target in RESHAPES or chain[-1].target in TRANSPOSES:
        chain.append(operands(chain[-1])[0])
    *views, product = chain
    low = product.meta["val"].dtype in (torch.bfloat16, torch.float16)
    if product.target is not aten.mm.default or not low or any(len(n.users) > 1 for n in chain):
        return
    product.target = WIDE_PRODUCT
    for node in (product, *views):
        node.meta["val"] = node.meta["val"].to(torch.float32)
        node.meta["made_by"] = "wide_gradients"
    cast.replace_all_uses_with(chain[0])
    cast.graph.erase_node(cast)
