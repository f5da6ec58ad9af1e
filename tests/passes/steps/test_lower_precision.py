"""Casts in the forward graph, which is then differentiated again."""

from __future__ import annotations

import torch

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.text import graph_text
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan.plan import Plan, Precision
from tests.passes.captured import eager, inputs_of, layer

BEFORE = """\
%p_model_proj_weight: f32[3,4] = input
%args_0: f32[8,4] = input
%args_1: f32[8,3] = input
%linear: f32[8,3] = aten.linear(%args_0, %p_model_proj_weight)
%tanh: f32[8,3] = aten.tanh(%linear)
%mse_loss_default: f32[] = aten.mse_loss(%tanh, %args_1, 2)
%div_tensor: f32[] = aten.div.Tensor(%mse_loss_default, 24)
return (%div_tensor)
"""
AFTER = """\
%p_model_proj_weight: f32[3,4] = input
%args_0: f32[8,4] = input
%args_1: f32[8,3] = input
%_to_copy_default: bf16[8,4] = aten._to_copy(%args_0, dtype=bf16)
%_to_copy_default_1: bf16[3,4] = aten._to_copy(%p_model_proj_weight, dtype=bf16)
%linear: bf16[8,3] = aten.linear(%_to_copy_default, %_to_copy_default_1)
%tanh: bf16[8,3] = aten.tanh(%linear)
%_to_copy_default_2: f32[8,3] = aten._to_copy(%tanh, dtype=f32)
%mse_loss_default: f32[] = aten.mse_loss(%_to_copy_default_2, %args_1, 2)
%div_tensor: f32[] = aten.div.Tensor(%mse_loss_default, 24)
return (%div_tensor)
"""
LOW = Plan(1, precision=Precision(compute="bfloat16"), batch=8)


def text(step: StepGraph) -> str:
    return graph_text(step.forward.graph.graph)


def before() -> str:
    return text(layer(torch.float32)[2])


def applied() -> str:
    return text(lower_precision(layer(torch.float32)[2], LOW))


def test_text() -> None:
    step = layer(torch.float32)[2]
    assert text(step) == BEFORE
    assert text(lower_precision(step, LOW)) == AFTER
    assert lower_precision(step, Plan(1, batch=8)) is step


def test_values() -> None:
    """Not exact: within the precision of bfloat16, whose unit is 2^-8."""
    model, batch, step = layer(torch.float32)
    got = lower_precision(step, LOW).graph(*inputs_of(model, batch, step))
    for value, wanted in zip(got, eager(model, batch), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)
