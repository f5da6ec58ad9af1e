"""Random small calls of ops that read and write at places that a tensor names, and of losses that
take several labels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from graphaccel.kernels.ops import ctc_loss
from tests.support.ops.calls import Arguments, Case, Draw, scatter_add_call, unary_call
from tests.support.recorded import Traced, through

aten = torch.ops.aten


def _put_call(*rest: Any) -> Case:
    """index_add and its like: (base, dim, index, source)."""

    def case(d: Draw) -> Arguments:
        shape = d.shape()
        dim = d.one(*range(len(shape)))
        count = d.one(2, 4, 6) if not rest and not d.one(0, 1) else shape[dim]
        base = d.real(*shape)
        base = d.one(base, torch.zeros_like(base))
        index = torch.randperm(shape[dim])[:count]
        if count > len(index):
            index = d.whole(shape[dim], count)
        source = d.real(*shape[:dim], count, *shape[dim + 1 :])
        return (base, dim, index, source, *rest), {}

    return case


def _once_call(d: Draw) -> Arguments:
    """index_copy: no place is named twice."""
    shape = d.shape()
    dim = d.one(*range(len(shape)))
    return (d.real(*shape), dim, torch.randperm(shape[dim]), d.real(*shape)), {}


def _reduced_call(d: Draw) -> Arguments:
    args, _ = scatter_add_call(d)
    return (*args, d.one("sum", "prod", "mean", "amax", "amin")), {
        "include_self": d.one(True, False)
    }


def _added_call(d: Draw) -> Arguments:
    """scatter_add, perhaps into zeros, perhaps of a longer source."""
    (base, dim, index, source), _ = scatter_add_call(d)
    longer = torch.cat([source, source], d.one(*range(source.dim())))
    return (d.one(base, torch.zeros_like(base)), dim, index, d.one(source, source, longer)), {}


def _filled_call(number: bool) -> Case:
    def case(d: Draw) -> Arguments:
        value = d.one(0, 1.5) if number else d.real()
        return (d.real(4, 2), d.one(0, 1), d.whole(2, 2), value), {}

    return case


def _margin(several: bool) -> Traced:
    def draw(d: Draw) -> tuple[Any, ...]:
        n, reduction = d.size(), d.one("none", "sum", "mean")
        if several:
            labels = torch.tensor([[1, 0, -1, 2], [3, -1, 0, 0]] * (n // 2))
            return lambda x: F.multilabel_margin_loss(x, labels, reduction=reduction), d.real(n, 4)
        labels, weight = d.whole(4, n), d.one(None, d.positive(4))
        return (
            lambda x: F.multi_margin_loss(x, labels, weight=weight, reduction=reduction),
            d.real(n, 4),
        )

    return draw


def _ctc_call(d: Draw) -> Arguments:
    n = d.size()
    given, lengths = torch.tensor([4, 3] * (n // 2)), torch.tensor([2, 1] * (n // 2))
    targets = 1 + d.one(d.whole(3, n, 2), d.whole(3, int(lengths.sum())))
    return (d.real(4, n, 4).log_softmax(-1), targets, given, lengths, 0, d.one(True, False)), {}


CASES: Mapping[Any, Case] = MappingProxyType(
    {
        ctc_loss.OP: _ctc_call,
        aten.index_add.default: _put_call(),
        aten.index_copy.default: _once_call,
        aten.index_reduce.default: lambda d: _put_call(d.one("prod", "mean", "amax", "amin"))(d),
        aten.index_fill.int_Scalar: _filled_call(number=True),
        aten.index_fill.int_Tensor: _filled_call(number=False),
        aten.scatter_add.default: _added_call,
        aten.scatter.value: lambda d: (
            (*scatter_add_call(d)[0][:3], d.one(0, 2.0)),
            {},
        ),
        aten.scatter_reduce.two: _reduced_call,
        aten.take.default: lambda d: ((d.real(4, 2), d.whole(8, *d.shape(1, 2))), {}),
        aten.put.default: lambda d: (
            (d.real(4, 2), d.whole(8, 4), d.real(4), d.one(True, False)),
            {},
        ),
        aten.masked_scatter.default: lambda d: ((d.real(4, 2), d.truth(4, 2), d.real(8)), {}),
        aten.masked_scatter_backward.default: lambda d: ((d.real(4, 2), d.truth(4, 2), [8]), {}),
        aten.diagonal_scatter.default: lambda d: (
            (d.real(2, 4, 4), d.real(2, 4), 0, *d.one((1, 2), (-1, 1))),
            {},
        ),
        aten.renorm.default: lambda d: ((d.real(4, 2, 2), 2.0, d.one(0, 1, -1), 0.7), {}),
        aten.trace.default: lambda d: ((d.real(4, 2),), {}),
        aten.block_diag.default: lambda d: (([d.real(2, 4), d.real(4, 2)],), {}),
        aten.alias.default: unary_call(),
        **through(
            {
                (
                    aten.multi_margin_loss.default,
                    aten.multi_margin_loss_backward.default,
                ): _margin(several=False),
                (
                    aten.multilabel_margin_loss_forward.default,
                    aten.multilabel_margin_loss_backward.default,
                ): _margin(several=True),
            }
        ),
    }
)
