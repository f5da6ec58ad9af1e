"""Convolutions and pooling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from graphaccel.ort.builder import MICROSOFT, Arguments, Builder, Declined, OnnxValue, Translations

aten = torch.ops.aten


def _geometry(a: Arguments) -> dict[str, Any]:
    rank = len(a["weight"].shape) - 2

    def each(value: Any) -> list[int]:
        numbers = list(value) if isinstance(value, (list, tuple)) else [value]
        return [int(n) for n in (numbers * rank if len(numbers) == 1 else numbers)]

    if a["transposed"]:
        raise Declined("it is a transposed convolution")
    return {
        "strides": each(a["stride"]),
        "pads": each(a["padding"]) * 2,
        "dilations": each(a["dilation"]),
        "group": a["groups"],
        "kernel_shape": list(a["weight"].shape[2:]),
    }


def _convolution(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    given = [v for v in (a["input"], a["weight"], a["bias"]) if v is not None]
    return b.op("Conv", *given, shape=tuple(node.meta["val"].shape), **_geometry(a))


def _convolution_backward(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue | None]:
    grad, x, weight = a["grad_output"], a["input"], a["weight"]
    geometry = _geometry(a)
    wanted = a["output_mask"]
    results: list[OnnxValue | None] = [None, None, None]
    if wanted[2]:
        rest = [d for d in range(len(grad.shape)) if d != 1]
        results[2] = b.reduce("ReduceSum", grad, rest, False)
    if b.can("ConvGrad", grad, x, weight, outputs=2) and (wanted[0] or wanted[1]):
        results[:2] = b.ops(
            "ConvGrad",
            grad,
            x,
            weight,
            results=[(x.shape, x.dtype), (weight.shape, x.dtype)],
            domain=MICROSOFT,
            **geometry,
        )
        return results
    if wanted[0]:
        results[0] = _input_gradient(b, grad, x, weight, geometry)
    if wanted[1]:
        results[1] = _weight_gradient(b, grad, x, weight, geometry)
    return results


def _input_gradient(
    b: Builder, grad: OnnxValue, x: OnnxValue, weight: OnnxValue, geometry: dict
) -> OnnxValue:
    """The transposed convolution, with output_padding for the elements that the forward's floor
    division dropped."""
    rank = len(x.shape) - 2
    strides, pads, dilations = (geometry[k] for k in ("strides", "pads", "dilations"))
    reached = [
        (grad.shape[2 + i] - 1) * strides[i]
        - 2 * pads[i]
        + dilations[i] * (weight.shape[2 + i] - 1)
        + 1
        for i in range(rank)
    ]
    extra = [x.shape[2 + i] - reached[i] for i in range(rank)]
    return b.op("ConvTranspose", grad, weight, shape=x.shape, output_padding=extra, **geometry)


def _weight_gradient(
    b: Builder, grad: OnnxValue, x: OnnxValue, weight: OnnxValue, geometry: dict
) -> OnnxValue:
    """Correlate input and gradient: batch and channels change roles, so do stride and dilation."""
    if geometry["group"] != 1:
        raise Declined("its weight gradient is grouped")
    rank = len(x.shape) - 2
    swap = [1, 0, *range(2, 2 + rank)]
    strides, pads, dilations = (geometry[k] for k in ("strides", "pads", "dilations"))
    sizes = [
        (x.shape[2 + i] + 2 * pads[i] - strides[i] * (grad.shape[2 + i] - 1) - 1) // dilations[i]
        + 1
        for i in range(rank)
    ]
    built = b.op(
        "Conv",
        b.transpose(x, swap),
        b.transpose(grad, swap),
        shape=[x.shape[1], grad.shape[1], *sizes],
        strides=dilations,
        dilations=strides,
        pads=pads,
        kernel_shape=list(grad.shape[2:]),
    )
    for i in range(rank):
        built = b.slice(built, 2 + i, 0, weight.shape[2 + i])
    return b.transpose(built, swap)


def _window(a: Arguments, size: str = "kernel_size") -> dict[str, Any]:
    """Kernel, strides and pads of a pooling over two dims."""
    if a.get("ceil_mode"):
        raise Declined("it rounds sizes up")

    def both(value: Any) -> list[int]:
        numbers = list(value) if isinstance(value, (list, tuple)) else [value]
        return [int(n) for n in (numbers * 2 if len(numbers) == 1 else numbers)]

    kernel = both(a[size])
    return {
        "kernel_shape": kernel,
        "strides": both(a["stride"]) if a["stride"] else kernel,
        "pads": both(a["padding"]) * 2,
    }


def _max_pool(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    """ONNX counts positions in the whole tensor, torch in one image."""
    x = a["self"]
    if len(x.shape) != 4:
        raise Declined("it has no batch")
    shape = tuple(node.meta["val"][0].shape)
    collected = [(shape, x.dtype), (shape, torch.int64)]
    dilations = list(a["dilation"]) if isinstance(a["dilation"], (list, tuple)) else None
    settings = {**_window(a), "dilations": dilations}
    result, places = b.ops("MaxPool", x, results=collected, **settings)
    size = b.constant(x.shape[2] * x.shape[3], torch.int64)
    return [result, b.binary("Mod", places, size)]


def _max_pool_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, grad, places = a["self"], a["grad_output"], a["indices"]
    rows = math.prod(x.shape[:-2])  # of images, which may have no batch
    zeros = b.expand(b.constant(0, grad.dtype), [rows, math.prod(x.shape[-2:])])
    flat = [rows, math.prod(grad.shape[-2:])]
    index, values = b.reshape(places, flat), b.reshape(grad, flat)
    built = b.op("ScatterElements", zeros, index, values, axis=1, reduction="add")
    return b.reshape(built, x.shape)


def _average_pool(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    if a["divisor_override"] is not None or len(a["self"].shape) != 4:
        raise Declined("it has no batch, or a divisor of its own")
    counted = int(a["count_include_pad"])
    shape = tuple(node.meta["val"].shape)
    return b.op("AveragePool", a["self"], shape=shape, count_include_pad=counted, **_window(a))


def _average_pool_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """Each gradient spread evenly over its window: a transposed convolution by 1 / size."""
    x, grad, window = a["self"], a["grad_output"], _window(a)
    padded = any(window["pads"]) and not a["count_include_pad"]
    if a["divisor_override"] is not None or len(x.shape) != 4 or padded:
        raise Declined("windows have different sizes")
    rows = x.shape[0] * x.shape[1]
    kernel = window["kernel_shape"]
    share = b.constant(1 / (kernel[0] * kernel[1]), x.dtype)
    weight = b.expand(share, [1, 1, *kernel])
    grad = b.reshape(grad, [rows, 1, *grad.shape[2:]])
    image = OnnxValue("", x.dtype, (rows, 1, *x.shape[2:]))
    geometry = {**window, "dilations": [1, 1], "group": 1}
    return b.reshape(_input_gradient(b, grad, image, weight, geometry), x.shape)


OPS: Translations = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool2d_backward.default: _average_pool_backward,
}
