"""Every node gets a stage, and a gradient that two stages make is taken apart."""

from __future__ import annotations

import torch

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.ir.text import node_text
from graphaccel.passes.stages.cut_stages import StagedGraph, cut_stages
from tests.passes.support import joint, values_of

GRAPH = """\
%w: f64[3,3] = input
%x: f64[4,3] = input
%mm: f64[4,3] = aten.mm(%x, %w)    # forward a
%mm_1: f64[4,3] = aten.mm(%mm, %w)    # forward b
%sum_1: f64[] = aten.sum(%mm_1)    # forward
%ones_like: f64[4,3] = aten.ones_like(%mm_1)    # backward
%t: f64[3,4] = aten.t(%mm)    # backward b
%mm_2: f64[3,3] = aten.mm(%t, %ones_like)    # backward b
%t_1: f64[3,3] = aten.t(%w)    # backward b
%mm_3: f64[4,3] = aten.mm(%ones_like, %t_1)    # backward b
%t_2: f64[3,4] = aten.t(%x)    # backward a
%mm_4: f64[3,3] = aten.mm(%t_2, %mm_3)    # backward a
%add: f64[3,3] = aten.add.Tensor(%mm_2, %mm_4)    # backward
return (%sum_1, %add)
"""
ORIGINS = {"ones_like": "sum_1", "t": "mm_1", "mm_2": "mm_1", "t_1": "mm_1", "mm_3": "mm_1",
           "t_2": "mm", "mm_4": "mm", "add": "mm"}  # fmt: skip
AFTER = """\
0 %mm: f64[4,3] = aten.mm(%x, %w)
1 %mm_1: f64[4,3] = aten.mm(%mm, %w)
1 %sum_1: f64[] = aten.sum(%mm_1)
1 %ones_like: f64[4,3] = aten.ones_like(%mm_1)
1 %t: f64[3,4] = aten.t(%mm)
1 %mm_2: f64[3,3] = aten.mm(%t, %ones_like)
1 %t_1: f64[3,3] = aten.t(%w)
1 %mm_3: f64[4,3] = aten.mm(%ones_like, %t_1)
- %t_2: f64[3,4] = aten.t(%x)
0 %mm_4: f64[3,3] = aten.mm(%t_2, %mm_3)
- return (%sum_1, %mm_4, %mm_2)
w: 0 mm_4, 1 mm_2
"""


def cut(cuts: tuple[str, ...]) -> StagedGraph:
    module = joint(GRAPH)
    for node in module.graph.nodes:
        node.meta["origin"] = ORIGINS.get(node.name, node.name)
    inputs = (GraphInput("parameter", "w"), GraphInput("batch", "x", leaf=0))
    outputs = (GraphOutput("loss"), GraphOutput("gradient", name="w"))
    return cut_stages(module, inputs, outputs, {"mm": 0, "mm_1": 1, "sum_1": 2}, cuts)


def staged_text(staged: StagedGraph) -> str:
    """Each call with its stage; then the stages of each gradient."""
    lines = [
        f"{staged.stage.get(node, '-')} {node_text(node)}\n"
        for node in staged.graph.graph.nodes
        if node.op != "placeholder"
    ]
    for name, terms in staged.gradients.items():
        lines.append(f"{name}: {', '.join(f'{stage} {node.name}' for stage, node in terms)}\n")
    return "".join(lines)


BEFORE = """\
0 %mm: f64[4,3] = aten.mm(%x, %w)
0 %mm_1: f64[4,3] = aten.mm(%mm, %w)
0 %sum_1: f64[] = aten.sum(%mm_1)
0 %ones_like: f64[4,3] = aten.ones_like(%mm_1)
0 %t: f64[3,4] = aten.t(%mm)
0 %mm_2: f64[3,3] = aten.mm(%t, %ones_like)
0 %t_1: f64[3,3] = aten.t(%w)
0 %mm_3: f64[4,3] = aten.mm(%ones_like, %t_1)
- %t_2: f64[3,4] = aten.t(%x)
0 %mm_4: f64[3,3] = aten.mm(%t_2, %mm_3)
0 %add: f64[3,3] = aten.add.Tensor(%mm_2, %mm_4)
- return (%sum_1, %add)
w: 0 add
"""


def applied() -> str:
    return staged_text(cut(("mm",)))


def test_text() -> None:
    assert staged_text(cut(())) == BEFORE
    assert applied() == AFTER


def test_values() -> None:
    """The partial gradients of the stages add up to the gradient."""
    given = values_of(joint(GRAPH))
    loss, gradient = joint(GRAPH)(*given)
    got, *terms = cut(("mm",)).graph(*given)
    assert torch.equal(got, loss)
    torch.testing.assert_close(sum(terms), gradient, rtol=1e-12, atol=1e-12)
