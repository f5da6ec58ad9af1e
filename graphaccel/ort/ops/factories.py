"""Ops that create tensors from numbers only."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, Declined, OnnxValue, Translate, Translations

aten = torch.ops.aten
_LARGEST_RANGE = 1 << 16


def _filled(b: Builder, node: fx.Node, number: Any) -> OnnxValue:
    value = node.meta["val"]
    return b.expand(b.constant(number, value.dtype), tuple(value.shape))


def _number(number: float) -> Translate:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        return _filled(b, node, number)

    return translate


def _given(name: str) -> Translate:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        number = a[name]
        if isinstance(number, OnnxValue):
            value = node.meta["val"]
            return b.expand(b.cast(number, value.dtype), tuple(value.shape))
        return _filled(b, node, number)

    return translate


def _arange(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    value = node.meta["val"]
    if value.numel() > _LARGEST_RANGE:
        raise Declined("it would be a large constant")
    built = torch.arange(a.get("start", 0), a["end"], a.get("step", 1), dtype=value.dtype)
    return b.constant(built.numpy(), value.dtype)


_zero, _one = _number(0), _number(1)

OPS: Translations = {
    aten.zeros.default: _zero,
    aten.zeros_like.default: _zero,
    aten.new_zeros.default: _zero,
    aten.ones.default: _one,
    aten.ones_like.default: _one,
    aten.new_ones.default: _one,
    aten.full.default: _given("fill_value"),
    aten.full_like.default: _given("fill_value"),
    aten.new_full.default: _given("fill_value"),
    aten.scalar_tensor.default: _given("s"),
    aten.fill.Tensor: _given("value"),
    aten.fill.Scalar: _given("value"),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
}
