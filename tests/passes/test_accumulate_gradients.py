"""A matmul adds its gradient to an accumulator, which the first microbatch writes instead."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch

from graphaccel.ir.program import StageProgram
from graphaccel.passes.gradients.accumulate_gradients import accumulate_gradients
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import LINEAR, held_by_linear, program_of, text_of

BEFORE = LINEAR
AFTER = """\
forward(parameter w, batch #0) -> (loss, saved relu)
%w: f64[4,3] = input
%x: f64[5,4] = input
%mm: f64[5,3] = aten.mm(%x, %w)    # forward a
%relu: f64[5,3] = aten.relu(%mm)    # forward
%sum_1: f64[] = aten.sum(%relu)    # forward
return (%sum_1, %relu)
backward first(batch #0, saved relu, accumulator w) -> ()
%x: f64[5,4] = input
%relu: f64[5,3] = input
%acc_mm_1_0: f64[4,3] = input
%ones_like: f64[5,3] = aten.ones_like(%relu)    # backward
%threshold_backward: f64[5,3] = aten.threshold_backward(%ones_like, %relu, 0)    # backward
%t: f64[4,5] = aten.t(%x)    # backward a
%mm_out: f64[4,3] = aten.mm.out(%t, %threshold_backward, out=%acc_mm_1_0)    # backward a by accumulate_gradients
return ()
backward last(batch #0, saved relu, accumulator w) -> ()
%x: f64[5,4] = input
%relu: f64[5,3] = input
%acc_mm_1_0: f64[4,3] = input
%ones_like: f64[5,3] = aten.ones_like(%relu)    # backward
%threshold_backward: f64[5,3] = aten.threshold_backward(%ones_like, %relu, 0)    # backward
%t: f64[4,5] = aten.t(%x)    # backward a
%addmm__default: f64[4,3] = aten.addmm_(%acc_mm_1_0, %t, %threshold_backward)    # backward a by accumulate_gradients
return ()
"""


def applied() -> StageProgram:
    return accumulate_gradients(program_of(BEFORE), Plan(1, microbatches=2, batch=10))


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_values() -> None:
    """Of two microbatches, the sum of both gradients."""
    w, x = held_by_linear().values()
    before, after = program_of(BEFORE), applied()
    total = torch.full_like(w, float("nan"))
    wanted = torch.zeros_like(w)
    for number, batch in enumerate((x, x + 1.0)):
        _, relu = before.forward(w, batch)
        wanted += before.backwards[True, True](batch, relu)[0]
        after.backwards[number == 0, number == 1](batch, relu, total)
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
