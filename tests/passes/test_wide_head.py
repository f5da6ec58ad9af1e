"""A fused head casts its weight itself, and its gradient is not rounded: text and values."""

# ruff: noqa: E501  # graph text has long lines

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from graphaccel.passes.gradients.wide_head import wide_head
from tests.passes.support import joint, text_of_graph

BEFORE = """\
%x: bf16[8,16] = input
%w: f32[40,16] = input
%b: f32[40] = input
%labels: i64[8] = input
%f: f32[] = input
%_to_copy: bf16[40,16] = aten._to_copy(%w, dtype=bf16)    # forward
%linear_cross_entropy: (f32[], bf16[8,16], bf16[40,16], bf16[40]) = graphaccel.linear_cross_entropy(%x, %_to_copy, %b, %labels, -100, 4)    # forward
%getitem: f32[] = getitem(%linear_cross_entropy, 0)    # forward
%getitem_1: bf16[40,16] = getitem(%linear_cross_entropy, 2)    # forward
%getitem_2: bf16[40] = getitem(%linear_cross_entropy, 3)    # forward
%mul: bf16[40,16] = aten.mul.Tensor(%getitem_1, %f)    # backward
%mul_1: bf16[40] = aten.mul.Tensor(%getitem_2, %f)    # backward
%_to_copy_1: f32[40,16] = aten._to_copy(%mul, dtype=f32)    # backward
%_to_copy_2: f32[40] = aten._to_copy(%mul_1, dtype=f32)    # backward
return (%getitem, %_to_copy_1, %_to_copy_2)
"""
AFTER = """\
%x: bf16[8,16] = input
%w: f32[40,16] = input
%b: f32[40] = input
%labels: i64[8] = input
%f: f32[] = input
%linear_cross_entropy: (f32[], bf16[8,16], f32[40,16], f32[40]) = graphaccel.linear_cross_entropy(%x, %w, %b, %labels, -100, 4)    # forward
%getitem: f32[] = getitem(%linear_cross_entropy, 0)    # forward
%getitem_1: f32[40,16] = getitem(%linear_cross_entropy, 2)    # forward
%getitem_2: f32[40] = getitem(%linear_cross_entropy, 3)    # forward
%mul: f32[40,16] = aten.mul.Tensor(%getitem_1, %f)    # backward
%mul_1: f32[40] = aten.mul.Tensor(%getitem_2, %f)    # backward
return (%getitem, %mul, %mul_1)
"""


def test_text() -> None:
    assert text_of_graph(wide_head(joint(BEFORE))) == AFTER


def test_a_gradient_that_is_read_in_16_bits_stays() -> None:
    text = BEFORE.replace("%_to_copy_2)\n", "%mul_1)\n")
    text = text.replace(
        "%_to_copy_2: f32[40] = aten._to_copy(%mul_1, dtype=f32)    # backward\n", ""
    )
    assert text_of_graph(wide_head(joint(text))) == text


def test_gradients_are_those_of_float64_and_not_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=generator).bfloat16()
    shapes = (40, 16), (40,)
    weight, bias = (torch.randn(s, generator=generator).bfloat16().float() for s in shapes)
    labels = torch.randint(40, (8,), generator=generator)
    labels[2] = -100
    leaves = [t.double().requires_grad_() for t in (weight, bias)]
    loss = F.cross_entropy(F.linear(x.double(), *leaves), labels, reduction="sum")
    right = torch.autograd.grad(loss, leaves)

    def built_by(graph: fx.GraphModule) -> list[Tensor]:
        built, *gradients = graph(x, weight, bias, labels, torch.tensor(1.0))
        torch.testing.assert_close(built.double(), loss, rtol=1e-2, atol=0)
        return gradients

    before, after = built_by(joint(BEFORE)), built_by(wide_head(joint(BEFORE)))
    for rounded, wide, gradient in zip(before, after, right, strict=True):
        assert torch.equal(wide.bfloat16().float(), rounded)
        assert not torch.equal(wide, rounded)
        assert (wide - gradient).abs().max() < 2**-7 * gradient.abs().max()
