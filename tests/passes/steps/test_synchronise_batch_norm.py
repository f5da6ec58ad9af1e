"""Batch norm in sums over the batch, where the data axis splits it."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.ir.text import graph_text
from graphaccel.passes.microbatch.synchronise_batch_norm import synchronise_batch_norm
from graphaccel.planner.plan.plan import Plan
from tests.passes.captured import inputs_of

BEFORE = """\
%p_model_norm_weight: f64[3] = input
%p_model_norm_bias: f64[3] = input
%b_model_norm_running_mean: f64[3] = input
%b_model_norm_running_var: f64[3] = input
%b_model_norm_num_batches_tracked: i64[] = input
%args_0: f64[8,3] = input
%add: i64[] = aten.add.Tensor(%b_model_norm_num_batches_tracked, 1)
%_native_batch_norm_legit_functional: (f64[8,3], f64[3], f64[3], f64[3], f64[3]) = aten._native_batch_norm_legit_functional(%args_0, %p_model_norm_weight, %p_model_norm_bias, %b_model_norm_running_mean, %b_model_norm_running_var, True, 0.1, 1e-05)
%getitem: f64[8,3] = getitem(%_native_batch_norm_legit_functional, 0)
%getitem_3: f64[3] = getitem(%_native_batch_norm_legit_functional, 3)
%getitem_4: f64[3] = getitem(%_native_batch_norm_legit_functional, 4)
%pow_1: f64[8,3] = aten.pow.Tensor_Scalar(%getitem, 3)
%sum_1: f64[] = aten.sum(%pow_1)
return (%getitem_3, %getitem_4, %add, %sum_1)
"""
AFTER = """\
%p_model_norm_weight: f64[3] = input
%p_model_norm_bias: f64[3] = input
%b_model_norm_running_mean: f64[3] = input
%b_model_norm_running_var: f64[3] = input
%b_model_norm_num_batches_tracked: i64[] = input
%args_0: f64[8,3] = input
%add: i64[] = aten.add.Tensor(%b_model_norm_num_batches_tracked, 1)
%sum_dim_int_list: f64[3] = aten.sum.dim_IntList(%args_0, [0])    # by synchronise_batch_norm
%div_tensor: f64[3] = aten.div.Tensor(%sum_dim_int_list, 8)    # by synchronise_batch_norm
%reshape_default: f64[1,3] = aten.reshape(%div_tensor, [1, 3])    # by synchronise_batch_norm
%sub_tensor: f64[8,3] = aten.sub.Tensor(%args_0, %reshape_default)    # by synchronise_batch_norm
%mul_tensor: f64[8,3] = aten.mul.Tensor(%sub_tensor, %sub_tensor)    # by synchronise_batch_norm
%sum_dim_int_list_1: f64[3] = aten.sum.dim_IntList(%mul_tensor, [0])    # by synchronise_batch_norm
%div_tensor_1: f64[3] = aten.div.Tensor(%sum_dim_int_list_1, 8)    # by synchronise_batch_norm
%add_tensor: f64[3] = aten.add.Tensor(%div_tensor_1, 1e-05)    # by synchronise_batch_norm
%rsqrt_default: f64[3] = aten.rsqrt(%add_tensor)    # by synchronise_batch_norm
%reshape_default_1: f64[1,3] = aten.reshape(%rsqrt_default, [1, 3])    # by synchronise_batch_norm
%mul_tensor_1: f64[8,3] = aten.mul.Tensor(%sub_tensor, %reshape_default_1)    # by synchronise_batch_norm
%reshape_default_2: f64[1,3] = aten.reshape(%p_model_norm_weight, [1, 3])    # by synchronise_batch_norm
%mul_tensor_2: f64[8,3] = aten.mul.Tensor(%mul_tensor_1, %reshape_default_2)    # by synchronise_batch_norm
%reshape_default_3: f64[1,3] = aten.reshape(%p_model_norm_bias, [1, 3])    # by synchronise_batch_norm
%add_tensor_1: f64[8,3] = aten.add.Tensor(%mul_tensor_2, %reshape_default_3)    # by synchronise_batch_norm
%div_tensor_2: f64[3] = aten.div.Tensor(%sum_dim_int_list_1, 7)    # by synchronise_batch_norm
%mul_tensor_3: f64[3] = aten.mul.Tensor(%b_model_norm_running_mean, 0.9)    # by synchronise_batch_norm
%detach_default: f64[3] = aten.detach(%div_tensor)    # by synchronise_batch_norm
%mul_tensor_4: f64[3] = aten.mul.Tensor(%detach_default, 0.1)    # by synchronise_batch_norm
%add_tensor_2: f64[3] = aten.add.Tensor(%mul_tensor_3, %mul_tensor_4)    # by synchronise_batch_norm
%mul_tensor_5: f64[3] = aten.mul.Tensor(%b_model_norm_running_var, 0.9)    # by synchronise_batch_norm
%detach_default_1: f64[3] = aten.detach(%div_tensor_2)    # by synchronise_batch_norm
%mul_tensor_6: f64[3] = aten.mul.Tensor(%detach_default_1, 0.1)    # by synchronise_batch_norm
%add_tensor_3: f64[3] = aten.add.Tensor(%mul_tensor_5, %mul_tensor_6)    # by synchronise_batch_norm
%pow_1: f64[8,3] = aten.pow.Tensor_Scalar(%add_tensor_1, 3)
%sum_1: f64[] = aten.sum(%pow_1)
return (%add_tensor_2, %add_tensor_3, %add, %sum_1)
"""


class Norm(nn.Module):
    """sum(batch_norm(x)³)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x) ** 3).sum()


def made() -> tuple[nn.Module, Batch, StepGraph]:
    torch.manual_seed(0)
    model = Norm().double()
    batch = flatten_call((torch.randn(8, 3).double(),), {})
    return model, batch, capture(model, batch)


def text(step: StepGraph) -> str:
    return graph_text(step.forward.graph.graph, notes=True)


def before() -> str:
    return text(made()[2])


def applied() -> str:
    return text(synchronise_batch_norm(made()[2], Plan(2, data=2, batch=8)))


def test_text() -> None:
    step = made()[2]
    assert text(step) == BEFORE
    assert text(synchronise_batch_norm(step, Plan(2, data=2, batch=8))) == AFTER
    assert synchronise_batch_norm(step, Plan(1, batch=8)) is step


def test_values() -> None:
    """Loss, running statistics and gradients, of the whole batch."""
    model, batch, step = made()
    given = inputs_of(model, batch, step)
    after = synchronise_batch_norm(step, Plan(2, data=2, batch=8))
    assert [o.kind for o in after.outputs] == [o.kind for o in step.outputs]
    for got, wanted in zip(after.graph(*given), step.graph(*given), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
