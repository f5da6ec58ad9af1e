"""Normalisation and softmax, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from graphaccel.ort.builder import MICROSOFT, Arguments, Builder, Declined, OnnxValue, Translations

aten = torch.ops.aten


def _statistics(
    b: Builder, x: OnnxValue, dims: Sequence[int], epsilon: float
) -> tuple[OnnxValue, OnnxValue, OnnxValue]:
    """(x - mean, mean, 1 / √(variance + epsilon)), dims kept."""
    mean = b.reduce("ReduceMean", x, dims, True)
    centred = b.binary("Sub", x, mean)
    variance = b.reduce("ReduceMean", b.binary("Mul", centred, centred), dims, True)
    root = b.op("Sqrt", b.binary("Add", variance, b.scalar(epsilon, x)))
    return centred, mean, b.binary("Div", b.scalar(1, x), root)


def _layer_norm(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    x, weight, bias = a["input"], a["weight"], a["bias"]
    count = len(a["normalized_shape"])
    # The kernel computes its statistics in float32, which is too imprecise for a float64 backward;
    # that of the training build is slower than standard operators.
    if x.dtype == torch.float32 and weight is not None and not b.training:
        shapes = [tuple(v.shape) for v in node.meta["val"]]
        return b.ops(
            "LayerNormalization",
            x,
            weight,
            bias,
            results=[(s, x.dtype) for s in shapes],
            axis=-count,
            epsilon=a["eps"],
        )
    dims = list(range(len(x.shape) - count, len(x.shape)))
    centred, mean, scale = _statistics(b, x, dims, a["eps"])
    result = b.binary("Mul", centred, scale)
    if weight is not None:
        result = b.binary("Mul", result, weight)
    if bias is not None:
        result = b.binary("Add", result, bias)
    return [result, mean, scale]


def _layer_norm_backward(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue | None]:
    """With x̂ = (x - mean) r and h = g w: dx = r (h - mean(h) - x̂ mean(h x̂)).

    Ba, Kiros, Hinton, Layer Normalization, 2016.
    """
    grad, x, weight = a["grad_out"], a["input"], a["weight"]
    mean, scale = a["mean"], a["rstd"]
    count = len(a["normalized_shape"])
    rows = list(range(len(x.shape) - count))
    dims = list(range(len(x.shape) - count, len(x.shape)))
    # The kernel requires statistics in float32, whatever the other dtypes are.
    known: tuple[Any, ...] = (grad, x, weight, mean, scale)
    single = x.dtype == torch.float32
    if weight is not None and single and b.can("LayerNormalizationGrad", *known, outputs=3):
        shapes = [x.shape, weight.shape, weight.shape]
        return list(
            b.ops(
                "LayerNormalizationGrad",
                *known,
                results=[(s, x.dtype) for s in shapes],
                domain=MICROSOFT,
                axis=-count,
            )
        )
    wanted = a["output_mask"]
    unit = b.binary("Mul", b.binary("Sub", x, mean), scale)
    results: list[OnnxValue | None] = [None, None, None]
    if wanted[0]:
        inner = grad if weight is None else b.binary("Mul", grad, weight)
        results[0] = _normalised_backward(b, inner, unit, scale, dims)
    if wanted[1]:
        results[1] = b.reduce("ReduceSum", b.binary("Mul", grad, unit), rows, False)
    if wanted[2]:
        results[2] = b.reduce("ReduceSum", grad, rows, False)
    return results


def _channels(x: OnnxValue) -> tuple[list[int], list[int]]:
    """The dims over which a channel (dim 1) is normalised, and the shape that broadcasts to it."""
    rest = [d for d in range(len(x.shape)) if d != 1]
    return rest, [1 if d in rest else n for d, n in enumerate(x.shape)]


def _batch_norm(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    """Statistics over the batch; running ones are updated with the momentum, the variance unbiased.

    Ioffe and Szegedy, Batch Normalization, 2015.
    """
    if not a["training"]:
        raise Declined("it is not in training mode")
    x, momentum = a["input"], a["momentum"]
    rest, shape = _channels(x)
    centred, mean, scale = _statistics(b, x, rest, a["eps"])
    result = b.binary("Mul", centred, scale)
    for kind, name in (("Mul", "weight"), ("Add", "bias")):
        if a[name] is not None:
            result = b.binary(kind, result, b.reshape(a[name], shape))
    flat = [x.shape[1]]
    mean, scale = b.reshape(mean, flat), b.reshape(scale, flat)
    square = b.binary("Mul", centred, centred)
    total = b.reduce("ReduceSum", square, rest, False)
    count = prod(x.shape) // x.shape[1]
    variance = b.binary("Div", total, b.scalar(count - 1, x))

    def moved(old: OnnxValue, new: OnnxValue) -> OnnxValue:
        kept = b.binary("Mul", old, b.scalar(1 - momentum, old))
        return b.binary("Add", kept, b.binary("Mul", new, b.scalar(momentum, new)))

    running = [moved(a["running_mean"], mean), moved(a["running_var"], variance)]
    return [result, mean, scale, *running]


def _normalised_backward(
    b: Builder, grad: OnnxValue, unit: OnnxValue, scale: OnnxValue, dims: Sequence[int]
) -> OnnxValue:
    """r (g - mean(g) - x̂ mean(g x̂)), means over `dims`: the backward of every normalisation."""
    along = b.reduce("ReduceMean", b.binary("Mul", grad, unit), dims, True)
    rest = b.binary("Sub", grad, b.reduce("ReduceMean", grad, dims, True))
    return b.binary("Mul", b.binary("Sub", rest, b.binary("Mul", unit, along)), scale)


def _batch_norm_backward(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue | None]:
    if not a["train"]:
        raise Declined("it is not in training mode")
    grad, x, weight = a["grad_out"], a["input"], a["weight"]
    rest, shape = _channels(x)
    mean, scale = b.reshape(a["save_mean"], shape), b.reshape(a["save_invstd"], shape)
    unit = b.binary("Mul", b.binary("Sub", x, mean), scale)
    wanted = a["output_mask"]
    results: list[OnnxValue | None] = [None, None, None]
    if wanted[0]:
        inner = grad if weight is None else b.binary("Mul", grad, b.reshape(weight, shape))
        results[0] = _normalised_backward(b, inner, unit, scale, rest)
    if wanted[1]:
        results[1] = b.reduce("ReduceSum", b.binary("Mul", grad, unit), rest, False)
    if wanted[2]:
        results[2] = b.reduce("ReduceSum", grad, rest, False)
    return results


def _group_norm(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    """Statistics over each group of channels of each example (Wu and He, 2018)."""
    x, groups = a["input"], a["group"]
    rows = b.reshape(x, [a["N"] * groups, prod(x.shape) // (a["N"] * groups)])
    centred, mean, scale = _statistics(b, rows, [1], a["eps"])
    result = b.reshape(b.binary("Mul", centred, scale), x.shape)
    _, shape = _channels(x)
    for kind, name in (("Mul", "weight"), ("Add", "bias")):
        if a[name] is not None:
            result = b.binary(kind, result, b.reshape(a[name], shape))
    return [result, b.reshape(mean, [a["N"], groups]), b.reshape(scale, [a["N"], groups])]


def _group_norm_backward(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue | None]:
    grad, x, weight = a["grad_out"], a["input"], a["weight"]
    count = a["N"] * a["group"]
    flat = [count, prod(x.shape) // count]
    mean, scale = b.reshape(a["mean"], [count, 1]), b.reshape(a["rstd"], [count, 1])
    unit = b.binary("Mul", b.binary("Sub", b.reshape(x, flat), mean), scale)
    rest, shape = _channels(x)
    wanted = a["output_mask"]
    results: list[OnnxValue | None] = [None, None, None]
    if wanted[0]:
        inner = grad if weight is None else b.binary("Mul", grad, b.reshape(weight, shape))
        slope = _normalised_backward(b, b.reshape(inner, flat), unit, scale, [1])
        results[0] = b.reshape(slope, x.shape)
    if wanted[1]:
        product = b.binary("Mul", grad, b.reshape(unit, x.shape))
        results[1] = b.reduce("ReduceSum", product, rest, False)
    if wanted[2]:
        results[2] = b.reduce("ReduceSum", grad, rest, False)
    return results


def _softmax(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = b.cast(a["self"], node.meta["val"].dtype)
    return b.op("Softmax", x, axis=a["dim"] % len(x.shape))


def _safe_softmax(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """Softmax in which rows that are entirely -inf are 0, not NaN."""
    x = b.cast(a["self"], node.meta["val"].dtype)
    dim = a["dim"] % len(x.shape)
    low = b.scalar(-math.inf, x)
    largest = b.reduce("ReduceMax", x, [dim], True)
    empty = b.binary("Equal", largest, low, torch.bool)
    return b.where(empty, b.scalar(0, x), b.op("Softmax", x, axis=dim))


def softmax_backward(b: Builder, grad: OnnxValue, y: OnnxValue, dim: int) -> OnnxValue:
    """dx = y (g - Σ g y)."""
    if b.can("SoftmaxGrad_13", grad, y):
        return b.op("SoftmaxGrad_13", grad, y, domain=MICROSOFT, axis=dim)
    product = b.binary("Mul", grad, y)
    total = b.reduce("ReduceSum", product, [dim], True)
    return b.binary("Sub", product, b.binary("Mul", y, total))


def _softmax_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    grad, y = a["grad_output"], a["output"]
    dx = softmax_backward(b, grad, y, a["dim"] % len(y.shape))
    return b.cast(dx, node.meta["val"].dtype)


def _log_softmax(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = b.cast(a["self"], node.meta["val"].dtype)
    return b.op("LogSoftmax", x, axis=a["dim"] % len(x.shape))


def _log_softmax_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """dx = g - exp(y) Σ g; `LogSoftmaxGrad_13` is slower."""
    grad, y = a["grad_output"], a["output"]
    dim = a["dim"] % len(y.shape)
    total = b.reduce("ReduceSum", grad, [dim], True)
    dx = b.binary("Sub", grad, b.binary("Mul", b.op("Exp", y), total))
    return b.cast(dx, node.meta["val"].dtype)


OPS: Translations = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
}
