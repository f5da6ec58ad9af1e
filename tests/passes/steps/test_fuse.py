"""A fused op takes the place of the calls that its pattern describes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.ir.text import graph_text
from graphaccel.passes.fusion.fuse import fuse
from graphaccel.planner.plan.plan import Plan
from tests.passes.captured import eager, inputs_of

BEFORE = """\
%p_model_scale: f64[6] = input
%p_model_proj_weight: f64[6,4] = input
%args_0: f64[8,4] = input
%args_1: f64[8,6] = input
%linear: f64[8,6] = aten.linear(%args_0, %p_model_proj_weight)
%pow_1: f64[8,6] = aten.pow.Tensor_Scalar(%linear, 2)
%mean: f64[8,1] = aten.mean.dim(%pow_1, [-1], True)
%add: f64[8,1] = aten.add.Tensor(%mean, 1e-06)
%rsqrt: f64[8,1] = aten.rsqrt(%add)
%mul: f64[8,6] = aten.mul.Tensor(%linear, %rsqrt)
%mul_1: f64[8,6] = aten.mul.Tensor(%p_model_scale, %mul)
%sub: f64[8,6] = aten.sub.Tensor(%mul_1, %args_1)
%square: f64[8,6] = aten.square(%sub)
%sum_default: f64[] = aten.sum(%square)
%div_tensor: f64[] = aten.div.Tensor(%sum_default, 48)
return (%div_tensor)
"""
AFTER = """\
%p_model_scale: f64[6] = input
%p_model_proj_weight: f64[6,4] = input
%args_0: f64[8,4] = input
%args_1: f64[8,6] = input
%linear: f64[8,6] = aten.linear(%args_0, %p_model_proj_weight)
%rms_norm_default: (f64[8,6], f64[8,1]) = graphaccel.rms_norm(%linear, %p_model_scale, 1e-06)
%mul_1: f64[8,6] = getitem(%rms_norm_default, 0)
%sub: f64[8,6] = aten.sub.Tensor(%mul_1, %args_1)
%square: f64[8,6] = aten.square(%sub)
%sum_default: f64[] = aten.sum(%square)
%div_tensor: f64[] = aten.div.Tensor(%sum_default, 48)
return (%div_tensor)
"""
FUSED = Plan(1, batch=8, fusions=("rms_norm",))


class Normed(nn.Module):
    """mean((rms_norm(x @ w.t()) - y)²), the norm written out: float64 [B, 4] and [B, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.scale = nn.Linear(4, 6, bias=False), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.proj(x)
        h = self.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        return (h - y).square().mean()


def captured() -> tuple[nn.Module, Batch, StepGraph]:
    torch.manual_seed(0)
    model = Normed().double()
    batch = flatten_call((torch.randn(8, 4).double(), torch.randn(8, 6).double()), {})
    return model, batch, capture(model, batch, symbolic=True)


def text(step: StepGraph) -> str:
    return graph_text(step.forward.graph.graph)


def test_text() -> None:
    step = captured()[2]
    assert text(step) == BEFORE
    assert text(fuse(step, FUSED)) == AFTER
    assert fuse(step, Plan(1, batch=8)) is step


def test_the_backward_is_that_of_the_op() -> None:
    targets = {str(node.target) for node in fuse(captured()[2], FUSED).graph.graph.nodes}
    assert "graphaccel.rms_norm_backward.default" in targets
    assert "aten.rsqrt.default" not in targets


def test_values() -> None:
    model, batch, step = captured()
    results = fuse(step, FUSED).graph(*inputs_of(model, batch, step))
    for value, wanted in zip(results, eager(model, batch), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)
