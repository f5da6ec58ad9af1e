"""Views of a sharded parameter are made a second time for the backward."""

from __future__ import annotations

from torch import fx

from graphaccel.passes.parameters.recompute_casts import recompute_casts
from tests.passes.support import assert_same_bits, joint, text_of_graph

BEFORE = """\
%w: f64[3,4] = input
%x: f64[2,4] = input
%t: f64[4,3] = aten.t(%w)    # forward a
%mm: f64[2,3] = aten.mm(%x, %t)    # forward a
%tanh: f64[2,3] = aten.tanh(%mm)    # forward
%t_1: f64[3,4] = aten.t(%t)    # backward a
%mm_1: f64[2,4] = aten.mm(%tanh, %t_1)    # backward a
return (%tanh, %mm_1)
"""
AFTER = """\
%w: f64[3,4] = input
%x: f64[2,4] = input
%t: f64[4,3] = aten.t(%w)    # forward a
%mm: f64[2,3] = aten.mm(%x, %t)    # forward a
%tanh: f64[2,3] = aten.tanh(%mm)    # forward
%t_2: f64[4,3] = aten.t(%w)    # backward a by recompute_casts
%t_1: f64[3,4] = aten.t(%t_2)    # backward a
%mm_1: f64[2,4] = aten.mm(%tanh, %t_1)    # backward a
return (%tanh, %mm_1)
"""


def applied() -> fx.GraphModule:
    return recompute_casts(joint(BEFORE), {"w"})


def test_text() -> None:
    assert text_of_graph(applied()) == AFTER


def test_values() -> None:
    assert_same_bits(joint(BEFORE), applied())


def test_other_parameters_stay() -> None:
    assert text_of_graph(recompute_casts(joint(BEFORE), {"x"})) == BEFORE
