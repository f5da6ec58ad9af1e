"""Reductions: sums, means, extrema."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, OnnxValue, Translate, Translations

aten = torch.ops.aten


def _dims(x: OnnxValue, dims: Any) -> list[int]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(len(x.shape)))
    return [d % len(x.shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _reduction(kind: str) -> Translate:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        x = b.cast(a["self"], node.meta["val"].dtype)
        return b.reduce(kind, x, _dims(x, a.get("dim")), a.get("keepdim", False))

    return translate


def _mean(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = b.cast(a["self"], node.meta["val"].dtype)
    return b.reduce("ReduceMean", x, _dims(x, a.get("dim")), a.get("keepdim", False))


def _truth(kind: str) -> Translate:
    """any or all: the maximum or minimum of 0 and 1."""

    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        x = a["self"]
        if x.dtype != torch.bool:
            x = b.op("Not", b.binary("Equal", x, b.scalar(0, x), torch.bool))
        x = b.cast(x, torch.int32)
        dims = _dims(x, a.get("dim"))
        return b.cast(b.reduce(kind, x, dims, a.get("keepdim", False)), torch.bool)

    return translate


def _cumsum(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = b.cast(a["self"], node.meta["val"].dtype)
    return b.op("CumSum", x, b.constant(a["dim"] % max(1, len(x.shape)), torch.int64))


def _variance(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    """Variance and mean: (Σ (x - mean)²) / (n - correction)."""
    x = a["self"]
    dims = _dims(x, a["dim"])
    mean = b.reduce("ReduceMean", x, dims, True)
    centred = b.binary("Sub", x, mean)
    squares = b.reduce("ReduceSum", b.binary("Mul", centred, centred), dims, a["keepdim"])
    correction = 1 if a["correction"] is None else a["correction"]
    count = prod(x.shape[d] for d in dims) - correction
    variance = b.binary("Div", squares, b.scalar(count, x))
    return [variance, b.reshape(mean, tuple(node.meta["val"][1].shape))]


def _log_sum_exp(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = a["self"]
    return b.reduce("ReduceLogSumExp", x, _dims(x, a["dim"]), a["keepdim"])


OPS: Translations = {
    aten.sum.default: _reduction("ReduceSum"),
    aten.sum.dim_IntList: _reduction("ReduceSum"),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.amax.default: _reduction("ReduceMax"),
    aten.amin.default: _reduction("ReduceMin"),
    aten.any.default: _truth("ReduceMax"),
    aten.any.dim: _truth("ReduceMax"),
    aten.any.dims: _truth("ReduceMax"),
    aten.all.default: _truth("ReduceMin"),
    aten.all.dim: _truth("ReduceMin"),
    aten.cumsum.default: _cumsum,
    aten.logsumexp.default: _log_sum_exp,
    aten.var_mean.correction: _variance,
}
