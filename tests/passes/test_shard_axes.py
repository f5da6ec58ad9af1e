"""Each of two tensor ranks has half of a matmul's inner dim, and the sum is an all-reduce."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch

from graphaccel.compiler.programs import with_placements
from graphaccel.ir.program import Sharded
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.passes.shard_axes import shard_axes
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.local_graph import LocalGraph
from tests.passes.captured import eager, layer
from tests.passes.support import text_of_graph
from tests.support.lockstep import run_ranks

PLAN = Plan(2, tensor=2, batch=8, placements=(("proj.weight", (Sharded("tensor", 1),)),))
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
%p_proj_weight: f64[3,2] = input
%x_args_0_: f64[8,4] = input
%x_args_1_: f64[8,3] = input
%t: f64[2,3] = aten.t(%p_proj_weight)    # forward proj
%narrow_default: f64[8,2] = aten.narrow(%x_args_0_, 1, 0, 2)    # forward proj by shard_axis (tensor)
%clone_default: f64[8,2] = aten.clone(%narrow_default, memory_format=torch.contiguous_format)    # forward proj by shard_axis (tensor)
%mm: f64[8,3] = aten.mm(%clone_default, %t)    # forward proj
%all_reduce_default: f64[8,3] = _c10d_functional.all_reduce(%mm, sum, tensor)    # forward by shard_axis (tensor)
%wait_tensor_default: f64[8,3] = _c10d_functional.wait_tensor(%all_reduce_default)    # forward by shard_axis (tensor)
%tanh: f64[8,3] = aten.tanh(%wait_tensor_default)    # forward
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
%narrow_default_1: f64[3,2] = aten.narrow(%t_3, 1, 0, 2)    # backward proj by shard_axis (tensor)
%clone_default_1: f64[3,2] = aten.clone(%narrow_default_1, memory_format=torch.contiguous_format)    # backward proj by shard_axis (tensor)
return (%div, %clone_default_1)
"""


def sharded(plan: Plan) -> LocalGraph:
    step = layer()[2]
    plan = with_placements(step, plan)
    return shard_axes(exact_microbatch(step, plan).graph, step, plan)


def before() -> str:
    return text_of_graph(sharded(Plan(1, batch=8)).graph)


def applied() -> str:
    return text_of_graph(sharded(PLAN).graph)


def test_text() -> None:
    assert before() == BEFORE
    assert applied() == AFTER


def test_values() -> None:
    model, batch, _ = layer()
    loss, gradient = eager(model, batch)
    made = sharded(PLAN)
    assert made.parameter_shards == {"proj.weight": (Sharded("tensor", 1),)}
    (weight,) = (parameter.detach() for parameter in model.parameters())
    given = [[part.contiguous(), *batch.leaves] for part in weight.chunk(2, 1)]
    got = run_ranks(made.graph.graph, given, [{"tensor": 0}, {"tensor": 1}])
    for (own, part), wanted in zip(got, gradient.chunk(2, 1), strict=True):
        torch.testing.assert_close(own, loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(part, wanted, rtol=1e-12, atol=1e-14)
