"""Split the joint graph of every stage into its forward and its backward.

before (joint)                          after
  %y = aten.mm(%x, %w)     # forward      forward(%x, %w):   %y = aten.mm(%x, %w)
  %g = aten.mm(%t, %y)     # backward                        return (%y)            # saved
                                          backward(%t, %y):  %g = aten.mm(%t, %y)
                                                             return (%g)

`outline_stages` lists the nodes of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.nodes import copy_node
from graphaccel.ir.program import StageProgram
from graphaccel.ir.values import is_dense, propagate
from graphaccel.passes.stages.cut_stages import StagedGraph
from graphaccel.passes.stages.outline_stages import Outline, StageOutline


def split_phases(staged: StagedGraph, outlines: Sequence[StageOutline]) -> tuple[StageProgram, ...]:
    """One program for each outline."""
    return tuple(
        StageProgram(
            each.stage,
            _module(staged, each.stage, each.forward),
            tuple(v for _, v in each.forward.inputs),
            tuple(v for _, v in each.forward.outputs),
            {(True, True): _module(staged, each.stage, each.backward)},
            tuple(v for _, v in each.backward.inputs),
            tuple(v for _, v in each.backward.outputs),
            each.parameters,
            each.buffers,
        )
        for each in outlines
    )


def _module(staged: StagedGraph, stage: int, outline: Outline) -> fx.GraphModule:
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    values = []
    for node, _ in outline.inputs:
        built[node] = graph.placeholder(node.name)
        built[node].meta = dict(node.meta)
        value = node.meta["val"]
        foreign = staged.stage.get(node, stage) != stage
        # Received tensors are dense: an expanded tensor is sent contiguous.
        values.append(value.contiguous() if foreign and not is_dense(value) else value)
    for node in outline.body:
        built[node] = copy_node(graph, node, built)
    result = graph.output([built[n] for n, _ in outline.outputs])
    result.meta["phase"] = "output"
    module = graph_module(staged.graph, graph)
    propagate(module, values)
    return module
