"""Recompute: clones of a block's activations in the backward; the values stay the same bits."""

from __future__ import annotations

from torch import fx

from graphaccel.passes.activations.recompute import recompute
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import assert_same_bits, joint, text_of_graph

BEFORE = """\
%x: f64[4,3] = input
%w: f64[3,3] = input
%mm: f64[4,3] = aten.mm(%x, %w)    # forward h.0
%tanh: f64[4,3] = aten.tanh(%mm)    # forward h.0
%mm_1: f64[4,3] = aten.mm(%tanh, %w)    # forward h.0
%sum_1: f64[] = aten.sum(%mm_1)    # forward
%ones_like: f64[4,3] = aten.ones_like(%mm_1)    # backward
%t: f64[3,3] = aten.t(%w)    # backward h.0
%mm_2: f64[4,3] = aten.mm(%ones_like, %t)    # backward h.0
%tanh_backward: f64[4,3] = aten.tanh_backward(%mm_2, %tanh)    # backward h.0
%t_1: f64[3,4] = aten.t(%x)    # backward h.0
%mm_3: f64[3,3] = aten.mm(%t_1, %tanh_backward)    # backward h.0
return (%sum_1, %mm_3)
"""
AFTER = """\
%x: f64[4,3] = input
%w: f64[3,3] = input
%mm: f64[4,3] = aten.mm(%x, %w)    # forward h.0
%tanh: f64[4,3] = aten.tanh(%mm)    # forward h.0
%mm_1: f64[4,3] = aten.mm(%tanh, %w)    # forward h.0
%sum_1: f64[] = aten.sum(%mm_1)    # forward
%ones_like: f64[4,3] = aten.ones_like(%mm_1)    # backward
%t: f64[3,3] = aten.t(%w)    # backward h.0
%mm_2: f64[4,3] = aten.mm(%ones_like, %t)    # backward h.0
%mm_4: f64[4,3] = aten.mm(%x, %w)    # backward h.0 by recompute
%tanh_1: f64[4,3] = aten.tanh(%mm_4)    # backward h.0 by recompute
%tanh_backward: f64[4,3] = aten.tanh_backward(%mm_2, %tanh_1)    # backward h.0
%t_1: f64[3,4] = aten.t(%x)    # backward h.0
%mm_3: f64[3,3] = aten.mm(%t_1, %tanh_backward)    # backward h.0
return (%sum_1, %mm_3)
"""


def applied() -> fx.GraphModule:
    return recompute(joint(BEFORE), Plan(1, recompute=("h.0",)), {})


def test_text() -> None:
    assert text_of_graph(applied()) == AFTER


def test_values() -> None:
    assert_same_bits(joint(BEFORE), applied())


def test_blocks_that_are_not_named_stay() -> None:
    assert text_of_graph(recompute(joint(BEFORE), Plan(1, recompute=("h.1",)), {})) == BEFORE
