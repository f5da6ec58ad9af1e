"""A parameter on the host is copied to the device ahead of its use, in both phases."""

from __future__ import annotations

from graphaccel.ir.program import StageProgram
from graphaccel.passes.parameters.upload_parameters import upload_parameters
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import (
    LINEAR,
    assert_same_results,
    held_by_linear,
    program_of,
    text_of,
)

BEFORE = LINEAR
AFTER = """\
forward(parameter w, batch #0) -> (loss, saved relu)
%w: f64[4,3] = input
%x: f64[5,4] = input
%ahead_default: f64[4,3] = graphaccel.ahead(%w)    # forward a by upload_parameters
%arrived_default: f64[4,3] = graphaccel.arrived(%ahead_default)    # forward a by upload_parameters
%mm: f64[5,3] = aten.mm(%x, %arrived_default)    # forward a
%relu: f64[5,3] = aten.relu(%mm)    # forward
%sum_1: f64[] = aten.sum(%relu)    # forward
return (%sum_1, %relu)
backward first last(batch #0, saved relu) -> (gradient w)
%x: f64[5,4] = input
%relu: f64[5,3] = input
%ones_like: f64[5,3] = aten.ones_like(%relu)    # backward
%threshold_backward: f64[5,3] = aten.threshold_backward(%ones_like, %relu, 0)    # backward
%t: f64[4,5] = aten.t(%x)    # backward a
%mm_1: f64[4,3] = aten.mm(%t, %threshold_backward)    # backward a
return (%mm_1)
"""


def applied(offload: tuple[str, ...] = ("optimizer", "parameters")) -> StageProgram:
    return upload_parameters(program_of(BEFORE), Plan(1, offload=offload))


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_nothing_else_is_copied() -> None:
    assert text_of(applied(("optimizer",))) == BEFORE


def test_values() -> None:
    kinds = ("loss", "saved", "gradient")
    assert_same_results(program_of(BEFORE), applied(), held_by_linear(), kinds)
