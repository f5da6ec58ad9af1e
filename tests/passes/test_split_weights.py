"""The gradients of parameters go to a graph of their own, which reads what the backward keeps."""

from __future__ import annotations

import torch

from graphaccel.ir.program import StageProgram
from graphaccel.passes.stages.split_weights import split_weights, with_weights
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import program_of, text_of, values_of

BEFORE = """\
forward(parameter w, batch #0) -> (loss, saved tanh)
%w: f64[4,3] = input
%x: f64[5,4] = input
%mm: f64[5,3] = aten.mm(%x, %w)    # forward a
%tanh: f64[5,3] = aten.tanh(%mm)    # forward
%sum_1: f64[] = aten.sum(%tanh)    # forward
return (%sum_1, %tanh)
backward first last(parameter w, batch #0, saved tanh) -> (sent dx, gradient w)
%w: f64[4,3] = input
%x: f64[5,4] = input
%tanh: f64[5,3] = input
%ones_like: f64[5,3] = aten.ones_like(%tanh)    # backward
%tanh_backward: f64[5,3] = aten.tanh_backward(%ones_like, %tanh)    # backward
%t: f64[3,4] = aten.t(%w)    # backward a
%mm_1: f64[5,4] = aten.mm(%tanh_backward, %t)    # backward a
%t_1: f64[4,5] = aten.t(%x)    # backward a
%mm_2: f64[4,3] = aten.mm(%t_1, %tanh_backward)    # backward a
return (%mm_1, %mm_2)
"""
AFTER = """\
forward(parameter w, batch #0) -> (loss, saved tanh)
%w: f64[4,3] = input
%x: f64[5,4] = input
%mm: f64[5,3] = aten.mm(%x, %w)    # forward a
%tanh: f64[5,3] = aten.tanh(%mm)    # forward
%sum_1: f64[] = aten.sum(%tanh)    # forward
return (%sum_1, %tanh)
backward first last(parameter w, saved tanh) -> (sent dx, saved kept_tanh_backward)
%w: f64[4,3] = input
%tanh: f64[5,3] = input
%ones_like: f64[5,3] = aten.ones_like(%tanh)    # backward
%tanh_backward: f64[5,3] = aten.tanh_backward(%ones_like, %tanh)    # backward
%t: f64[3,4] = aten.t(%w)    # backward a
%mm_1: f64[5,4] = aten.mm(%tanh_backward, %t)    # backward a
return (%mm_1, %tanh_backward)
weight first last(batch #0, saved kept_tanh_backward) -> (gradient w)
%x: f64[5,4] = input
%tanh_backward: f64[5,3] = input
%t_1: f64[4,5] = aten.t(%x)    # backward a
%mm_2: f64[4,3] = aten.mm(%t_1, %tanh_backward)    # backward a
return (%mm_2)
"""


def applied(schedule: str = "zero_bubble") -> StageProgram:
    (program,), weights = split_weights((program_of(BEFORE),), Plan(1, schedule=schedule))
    return with_weights(program, *weights) if weights else program


def test_text() -> None:
    assert text_of(applied()) == AFTER


def test_other_schedules_keep_them_together() -> None:
    assert text_of(applied("1f1b")) == BEFORE


def test_values() -> None:
    whole, apart = program_of(BEFORE), applied()
    tanh = values_of(whole.forward)[0].new_ones(5, 3)
    w, x = values_of(whole.forward)
    wanted = whole.backwards[True, True](w, x, tanh)
    known = {"w": w, "#0": x, "tanh": tanh}

    def given(values):  # type: ignore[no-untyped-def]
        return [known[value.name or f"#{value.leaf}"] for value in values]

    results = apart.backwards[True, True](*given(apart.backward_inputs))
    known |= {v.name: r for v, r in zip(apart.backward_outputs, results, strict=True)}
    (gradient,) = apart.weights[True, True](*given(apart.weight_inputs))
    assert torch.equal(known["dx"], wanted[0])
    assert torch.equal(gradient, wanted[1])
