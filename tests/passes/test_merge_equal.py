"""Equal calls of the joint graph are one: text, the same bits, and what stays."""

from __future__ import annotations

from graphaccel.passes.activations.merge_equal import merge_equal
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import assert_same_bits, joint, text_of_graph

BEFORE = """\
%x: f64[4,3] = input
%w: f64[3] = input
%sub: f64[4,3] = aten.sub.Tensor(%x, %w)    # forward h.0
%mul: f64[4,3] = aten.mul.Tensor(%sub, 2)    # forward h.0
%mul_1: f64[4,3] = aten.mul.Tensor(%sub, 2.0)    # forward h.0
%sum_1: f64[] = aten.sum(%mul)    # forward
%sub_1: f64[4,3] = aten.sub.Tensor(%x, %w)    # backward h.0
%mul_2: f64[4,3] = aten.mul.Tensor(%sub_1, 2)    # backward h.0
%mul_3: f64[4,3] = aten.mul.Tensor(%mul_1, %mul_2)    # backward h.0
%exp: f64[4,3] = aten.exp(%mul_3)    # backward h.0
%exp_1: f64[4,3] = aten.exp(%mul_3)    # backward h.0
%rand_like: f64[4,3] = aten.rand_like(%x)    # backward
%rand_like_1: f64[4,3] = aten.rand_like(%x)    # backward
%sub_2: f64[4,3] = aten.sub.Tensor(%rand_like, %rand_like_1)    # backward
return (%sum_1, %exp, %exp_1, %sub_2)
"""
AFTER = "".join(
    line.replace("(%mul_1, %mul_2)", "(%mul_1, %mul)")
    for line in BEFORE.splitlines(keepends=True)
    if not line.startswith(("%sub_1:", "%mul_2:"))
)
DRAWS = BEFORE[BEFORE.index("%rand_like:") : BEFORE.index("return")]


def test_text() -> None:
    assert text_of_graph(merge_equal(joint(BEFORE), Plan(1), {})) == AFTER


def test_values() -> None:
    plain = BEFORE.replace(DRAWS, "").replace(", %sub_2)", ")")
    assert_same_bits(joint(plain), merge_equal(joint(plain), Plan(1), {}))


def test_what_is_recomputed_on_purpose_stays() -> None:
    graph = joint(BEFORE)
    next(n for n in graph.graph.nodes if n.name == "sub_1").meta["made_by"] = "recompute"
    assert "%sub_1: f64[4,3]" in text_of_graph(merge_equal(graph, Plan(1), {}))


def test_views_of_parameters_stay() -> None:
    """A saved view would keep a parameter that is copied from the host for each phase."""
    text = """\
%w: f64[4,3] = input
%x: f64[5,3] = input
%t: f64[3,4] = aten.t(%w)    # forward
%mm: f64[5,4] = aten.mm(%x, %t)    # forward
%t_1: f64[3,4] = aten.t(%w)    # backward
%t_2: f64[4,3] = aten.t(%t_1)    # backward
%mm_1: f64[5,3] = aten.mm(%mm, %t_2)    # backward
return (%mm, %mm_1)
"""
    assert text_of_graph(merge_equal(joint(text), Plan(1), {})) == text


def test_stages_share_nothing() -> None:
    graph, places = joint(BEFORE), {"before": 0, "after": 1}
    for node in graph.graph.nodes:
        node.meta["origin"] = "before" if node.name in ("sub", "mul", "mul_1") else "after"
    made = merge_equal(graph, Plan(2, pipeline=2, cuts=("before",)), places)
    assert "%sub_1: f64[4,3]" in text_of_graph(made)
