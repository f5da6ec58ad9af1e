"""An evaluation has the forward alone."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch

from graphaccel.passes.drop_backward import drop_backward
from graphaccel.planner.plan.plan import Plan
from tests.passes.captured import inputs_of, layer

BEFORE = """\
%p_proj_weight: f64[3,4] = input
%x_args_0_: f64[8,4] = input
%x_args_1_: f64[8,3] = input
%t: f64[4,3] = aten.t(%p_proj_weight)    # forward proj
%mm: f64[8,3] = aten.mm(%x_args_0_, %t)    # forward proj
%tanh: f64[8,3] = aten.tanh(%mm)    # forward
%mse_loss: f64[] = aten.mse_loss(%tanh, %x_args_1_, 2)    # forward
%div: f64[] = aten.div.Tensor(%mse_loss, 24)    # forward
%ones_like: f64[] = aten.ones_like(%div, pin_memory=False, memory_format=torch.preserve_format)    # backward
%div_1: f64[] = aten.div.Tensor(%ones_like, 24)    # backward
%mse_loss_backward: f64[8,3] = aten.mse_loss_backward(%div_1, %tanh, %x_args_1_, 2)    # backward
%tanh_backward: f64[8,3] = aten.tanh_backward(%mse_loss_backward, %tanh)    # backward
%t_1: f64[3,8] = aten.t(%tanh_backward)    # backward proj
%mm_1: f64[3,4] = aten.mm(%t_1, %x_args_0_)    # backward proj
%t_2: f64[4,3] = aten.t(%mm_1)    # backward proj
%t_3: f64[3,4] = aten.t(%t_2)    # backward proj
return (%div, %t_3)
"""
AFTER = """\
%p_proj_weight: f64[3,4] = input
%x_args_0_: f64[8,4] = input
%x_args_1_: f64[8,3] = input
%t: f64[4,3] = aten.t(%p_proj_weight)    # forward proj
%mm: f64[8,3] = aten.mm(%x_args_0_, %t)    # forward proj
%tanh: f64[8,3] = aten.tanh(%mm)    # forward
%mse_loss: f64[] = aten.mse_loss(%tanh, %x_args_1_, 2)    # forward
%div: f64[] = aten.div.Tensor(%mse_loss, 24)    # forward
return (%div)
"""


def before() -> str:
    return layer()[2].text()


def applied() -> str:
    return drop_backward(layer()[2], Plan(1, batch=8)).text()


def test_text() -> None:
    step = layer()[2]
    assert step.text() == BEFORE
    assert drop_backward(step, Plan(1, batch=8)).text() == AFTER


def test_values() -> None:
    model, batch, step = layer()
    given = inputs_of(model, batch, step)
    (loss,) = drop_backward(step, Plan(1, batch=8)).graph(*given)
    assert torch.equal(loss, step.graph(*given)[0])
