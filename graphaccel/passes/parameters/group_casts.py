"""Cast the parameters of a stage by one call instead of one call each.

before                                                 after
  %a: bf16[64,32] = aten._to_copy(%w, dtype=bf16)        %all = graphaccel.cast_all([%w, %v], bf16)
  ...                                                    %a: bf16[64,32] = getitem(%all, 0)
  %b: bf16[32] = aten._to_copy(%v, dtype=bf16)           %b: bf16[32] = getitem(%all, 1)

On a GPU that is a few launches in place of one for every weight and bias. The casts of a forward
are held until the backward, which reads them too.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from graphaccel.compat.torch.ops import is_view
from graphaccel.ir.program import StageProgram
from graphaccel.kernels.casts import CAST_ALL
from graphaccel.passes.parameters.parameter_groups import casts_to
from graphaccel.planner.plan.plan import Plan

_SMALL = 1 << 20  # bytes: held longer without a difference


def group_casts(program: StageProgram, plan: Plan) -> StageProgram:
    """Rewrite the forward of a program in place, and what runs once a step before it, where the
    plan has kernels made for a GPU."""
    if not plan.min_cut or "parameters" in plan.offload:
        return program
    low = getattr(torch, plan.precision.compute)
    for graph in (program.forward, program.prepare):
        if graph is not None:
            _group(graph, low)
    return program


def _group(module: fx.GraphModule, low: torch.dtype) -> None:
    graph = module.graph
    casts = [n for n in graph.nodes if casts_to(n, low) and _is_held(n)]
    if len(casts) < 2:
        return
    with graph.inserting_before(casts[0]):
        every = graph.call_function(CAST_ALL, ([n.args[0] for n in casts], low))
        every.meta = {**casts[0].meta, "val": [n.meta["val"] for n in casts]}
        every.meta["made_by"] = "group_casts"
        for i, cast in enumerate(casts):
            one = graph.call_function(getitem, (every, i))
            one.meta = {**cast.meta, "made_by": "group_casts"}
            cast.replace_all_uses_with(one)
    for cast in casts:
        graph.erase_node(cast)
    graph.lint()
    module.recompile()


def _is_held(cast: fx.Node) -> bool:
    """Whether a parameter's cast is returned, itself or a view of it, or is small."""
    source, value = cast.all_input_nodes[0], cast.meta["val"]
    if source.op != "placeholder" or source.meta["val"].dtype != torch.float32:
        return False
    shown = [cast]
    for node in shown:
        shown += [u for u in node.users if u.op == "call_function" and is_view(u)]
    held = any(u.op == "output" for n in shown for u in n.users)
    return held or value.numel() * value.element_size() <= _SMALL
