"""Calls of the joint graph as the simpler ones of Inductor: text and values."""

from __future__ import annotations

import torch

from graphaccel.passes.decompose import decompose
from tests.passes.support import joint, text_of_graph

BEFORE = """\
%x: f64[4,8] = input
%w: f64[8] = input
%b: f64[8] = input
%native_layer_norm: (f64[4,8], f64[4,1], f64[4,1]) = aten.native_layer_norm(%x, [8], %w, %b, 1e-05)    # forward h.0
%getitem: f64[4,8] = getitem(%native_layer_norm, 0)    # forward h.0
%tanh: f64[4,8] = aten.tanh(%getitem)    # forward h.0
%sum_1: f64[] = aten.sum(%tanh)    # forward
%ones_like: f64[4,8] = aten.ones_like(%tanh)    # backward
%tanh_backward: f64[4,8] = aten.tanh_backward(%ones_like, %tanh)    # backward h.0
return (%sum_1, %tanh_backward)
"""  # noqa: E501
AFTER = """\
%x: f64[4,8] = input
%w: f64[8] = input
%b: f64[8] = input
%var_mean: (f64[4,1], f64[4,1]) = aten.var_mean.correction(%x, [1], correction=0, keepdim=True)    # forward h.0 by decompose
%getitem_1: f64[4,1] = getitem(%var_mean, 0)    # forward h.0 by decompose
%getitem_2: f64[4,1] = getitem(%var_mean, 1)    # forward h.0 by decompose
%add: f64[4,1] = aten.add.Tensor(%getitem_1, 1e-05)    # forward h.0 by decompose
%rsqrt: f64[4,1] = aten.rsqrt(%add)    # forward h.0 by decompose
%sub: f64[4,8] = aten.sub.Tensor(%x, %getitem_2)    # forward h.0 by decompose
%mul: f64[4,8] = aten.mul.Tensor(%sub, %rsqrt)    # forward h.0 by decompose
%mul_1: f64[4,8] = aten.mul.Tensor(%mul, %w)    # forward h.0 by decompose
%add_1: f64[4,8] = aten.add.Tensor(%mul_1, %b)    # forward h.0 by decompose
%tanh: f64[4,8] = aten.tanh(%add_1)    # forward h.0
"""  # noqa: E501


def test_text() -> None:
    text = text_of_graph(decompose(joint(BEFORE)))
    assert text.startswith(AFTER)
    assert "tanh_backward" not in text


def test_values() -> None:
    inputs = [torch.randn(4, 8, dtype=torch.float64), *torch.randn(2, 8, dtype=torch.float64)]
    for made, right in zip(decompose(joint(BEFORE))(*inputs), joint(BEFORE)(*inputs), strict=True):
        torch.testing.assert_close(made, right, rtol=1e-13, atol=1e-14)


def test_casts_and_products_stay() -> None:
    text = """\
%x: f32[4,8] = input
%w: f32[8,8] = input
%_to_copy: bf16[4,8] = aten._to_copy(%x, dtype=bf16)    # forward
%mm: f32[4,8] = aten.mm(%x, %w)    # forward
return (%_to_copy, %mm)
"""
    assert text_of_graph(decompose(joint(text))) == text
