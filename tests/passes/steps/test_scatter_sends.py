"""What crosses a cut is sent in parts by the ranks of the tensor axis, and gathered behind it."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import pytest
import torch
from torch import fx

from graphaccel.ir.text import node_text
from graphaccel.passes.stages.cut_stages import StagedGraph
from graphaccel.passes.stages.scatter_sends import scatter_sends
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import joint, values_of
from tests.support.lockstep import run_ranks

GRAPH = """\
%x: f64[4,6] = input
%y: f64[4,6] = input
%add: f64[4,6] = aten.add.Tensor(%x, %y)    # forward a
%mul: f64[4,6] = aten.mul.Tensor(%add, %y)    # forward b
%sub: f64[4,6] = aten.sub.Tensor(%mul, %add)    # forward b
return (%sub)
"""
BEFORE = """\
0 %add: f64[4,6] = aten.add.Tensor(%x, %y)
1 %mul: f64[4,6] = aten.mul.Tensor(%add, %y)
1 %sub: f64[4,6] = aten.sub.Tensor(%mul, %add)
"""
AFTER = """\
0 %add: f64[4,6] = aten.add.Tensor(%x, %y)
0 %reshape_default: f64[24] = aten.reshape(%add, [24])
0 %narrow_default: f64[12] = aten.narrow(%reshape_default, 0, 0, 12)
0 %clone_default: f64[12] = aten.clone(%narrow_default)
1 %all_gather_into_tensor_default: f64[24] = _c10d_functional.all_gather_into_tensor(%clone_default, 2, tensor)
1 %wait_tensor_default: f64[24] = _c10d_functional.wait_tensor(%all_gather_into_tensor_default)
1 %reshape_default_1: f64[4,6] = aten.reshape(%wait_tensor_default, [4, 6])
1 %mul: f64[4,6] = aten.mul.Tensor(%reshape_default_1, %y)
1 %sub: f64[4,6] = aten.sub.Tensor(%mul, %reshape_default_1)
"""


def cut(*replicated: str) -> StagedGraph:
    """The graph with its first call on stage 0, and the values that every rank has."""
    module = joint(GRAPH)
    nodes = {node.name: node for node in module.graph.nodes}
    for name in replicated:
        nodes[name].meta["replicated"] = True
    stage = {nodes["add"]: 0, nodes["mul"]: 1, nodes["sub"]: 1}
    return StagedGraph(module, 2, stage, frozenset(), {}, {})


def applied(staged: StagedGraph, **options: bool) -> StagedGraph:
    return scatter_sends(staged, Plan(4, tensor=2, pipeline=2, cuts=("add",), **options))


def text_of(staged: StagedGraph) -> str:
    calls = [node for node in staged.graph.graph.nodes if node.op == "call_function"]
    return "".join(f"{staged.stage.get(node, '-')} {node_text(node)}\n" for node in calls)


def test_text() -> None:
    assert text_of(cut("add")) == BEFORE
    assert text_of(applied(cut("add"), scatter_sends=True)) == AFTER


@pytest.mark.parametrize("replicated", [(), ("add",)])
def test_nothing_changes_without_a_pin_or_equal_ranks(replicated: tuple[str, ...]) -> None:
    assert text_of(applied(cut(*replicated), scatter_sends=not replicated)) == BEFORE


def test_values() -> None:
    given = values_of(joint(GRAPH))
    expected = fx.Interpreter(joint(GRAPH)).run(*given)[0]
    after = applied(cut("add"), scatter_sends=True)
    for (result,) in run_ranks(after.graph.graph, [given] * 2, [{"tensor": 0}, {"tensor": 1}]):
        assert torch.equal(result, expected)
