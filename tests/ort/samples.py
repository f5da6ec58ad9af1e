"""A random small call of every op that has a translation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from graphaccel.ort.ops.table import TRANSLATIONS
from tests.support.ops import calls as c
from tests.support.ops import cases as ops
from tests.support.ops.calls import Case

aten = torch.ops.aten


def _positive(*rest: Any) -> Case:
    return lambda d: ((d.positive(*d.shape()), *rest), {})


def _truths(count: int) -> Case:
    def case(d: c.Draw) -> c.Arguments:
        shape = d.shape()
        return tuple(d.truth(*shape) for _ in range(count)), {}

    return case


def _like(*rest: Any, **kwargs: Any) -> Case:
    return lambda d: ((d.real(*d.shape()), *rest), kwargs)


def _sized(*rest: Any, **kwargs: Any) -> Case:
    return lambda d: ((d.shape(), *rest), {"dtype": torch.float64, **kwargs})


def _whole_range(*numbers: float) -> Case:
    return lambda d: (numbers, {"dtype": d.one(torch.int64, torch.float64)})


def _expanded(d: c.Draw) -> c.Arguments:
    return (d.real(4, 1, 2), d.one([4, 3, 2], [-1, 3, -1], [2, 4, 1, 2])), {}


def _convolution_backward(d: c.Draw) -> c.Arguments:
    n, groups, stride = d.size(), d.one(1, 1, 2), d.one(1, 2)
    size = 5 if stride == 1 else 3
    mask = d.one([True, True, True], [False, True, False], [True, True, False])
    tensors = (d.real(n, 4, size, size), d.real(n, 4, 5, 5), d.real(4, 4 // groups, 3, 3))
    return (*tensors, [4], [stride] * 2, [1, 1], [1, 1], False, [0, 0], groups, mask), {}


MORE: Mapping[Any, Case] = {
    aten.convolution_backward.default: _convolution_backward,
    aten.add.Scalar: c.unary_call(1.5),
    aten.sub.Scalar: c.unary_call(1.5),
    aten.rsub.Scalar: c.unary_call(1.5, 2),
    aten.pow.Tensor_Scalar: lambda d: (
        (d.positive(*d.shape()), d.one(1, 2, 3, 0.5, -0.5, 1.7)),
        {},
    ),
    aten.pow.Tensor_Tensor: lambda d: ((d.positive(4, 2), d.real(4, 2)), {}),
    aten.rsqrt.default: _positive(),
    aten.log.default: _positive(),
    aten.sqrt.default: _positive(),
    aten.reciprocal.default: _positive(),
    aten.gelu.default: lambda d: ((d.real(*d.shape()),), {"approximate": d.one("none", "tanh")}),
    aten.gelu_backward.default: lambda d: (
        (d.real(4, 2), d.real(4, 2)),
        {"approximate": d.one("none", "tanh")},
    ),
    aten.minimum.default: c.binary_call(),
    aten.clamp.default: lambda d: (
        (d.real(*d.shape()), d.one(-0.5, None), 0.5),
        {},
    ),
    aten.clamp_min.default: c.unary_call(0.1),
    aten.clamp_max.default: c.unary_call(0.1),
    aten.masked_fill.Tensor: lambda d: ((d.real(4, 2), d.truth(1, 2), d.real()), {}),
    aten._to_copy.default: lambda d: (
        (d.real(*d.shape()) * 3,),
        {"dtype": d.one(torch.float64, torch.float32, torch.int64, torch.bool)},
    ),
    aten.bitwise_and.Tensor: _truths(2),
    aten.bitwise_or.Tensor: _truths(2),
    aten.logical_and.default: _truths(2),
    aten.logical_or.default: _truths(2),
    aten.bitwise_not.default: _truths(1),
    aten.logical_not.default: _truths(1),
    aten.leaky_relu.default: c.unary_call(0.1),
    aten.leaky_relu_backward.default: c.twice_call(0.1, False),
    aten.alias.default: c.unary_call(),
    aten.expand.default: _expanded,
    aten.zeros.default: _sized(),
    aten.ones.default: _sized(),
    aten.full.default: _sized(2.5),
    aten.zeros_like.default: _like(),
    aten.ones_like.default: _like(),
    aten.new_zeros.default: _like([3, 2]),
    aten.new_ones.default: _like([3, 2]),
    aten.full_like.default: _like(-1.5),
    aten.new_full.default: _like([2], 7.0),
    aten.scalar_tensor.default: lambda d: ((d.one(-1.5, 0.0, 3.0),), {"dtype": torch.float64}),
    aten.fill.Scalar: _like(3.0),
    aten.arange.default: _whole_range(5),
    aten.arange.start: _whole_range(2, 7),
    aten.arange.start_step: _whole_range(1, 9, 3),
    aten.any.dims: lambda d: ((d.real(4, 2, 2), d.one([0], [0, 2])), {"keepdim": True}),
    aten.scatter.src: lambda d: (
        (d.real(4, 3), 1, torch.stack([torch.randperm(3)[:2] for _ in range(4)]), d.real(4, 2)),
        {},
    ),
    aten.scatter.value: lambda d: ((d.real(4, 3), 1, d.whole(3, 4, 1), 2.0), {}),
}
_COMPARED = ("eq", "ne", "gt", "lt", "ge", "le")
COMPARISONS: Mapping[Any, Case] = {
    **{getattr(aten, name).Tensor: c.binary_call() for name in _COMPARED},
    **{
        getattr(aten, name).Scalar: lambda d: ((d.whole(4, *d.shape()), d.one(1, 2)), {})
        for name in _COMPARED
    },
}
_ALL: Mapping[Any, Case] = {**ops.CASES, **MORE, **COMPARISONS}
CASES: Mapping[Any, Case] = MappingProxyType(
    {
        op: _ALL.get(op, c.unary_call())
        for op in TRANSLATIONS
        if op in _ALL or torch.Tag.pointwise in op.tags
    }
)
