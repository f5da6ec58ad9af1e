"""Lookups by index, and the scatter-adds that are their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, Declined, OnnxValue, Translations

aten = torch.ops.aten


def _embedding(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return _gathered(b, a["weight"], a["indices"], 0)


def _gathered(b: Builder, x: OnnxValue, index: OnnxValue, dim: int) -> OnnxValue:
    shape = [*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]]
    return b.op("Gather", x, index, shape=shape, axis=dim)


def _embedding_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """Rows of the gradient summed by index; lookups of the padding index contribute nothing."""
    if a["scale_grad_by_freq"]:
        raise Declined("it scales by how often an index occurs")
    grad, index, rows = a["grad_output"], a["indices"], a["num_weights"]
    width, count = grad.shape[-1], prod(index.shape)
    grad, index = b.reshape(grad, [count, width]), b.reshape(index, [count, 1])
    padding = a["padding_idx"]
    if padding is not None and padding >= 0:
        skipped = b.binary("Equal", index, b.scalar(padding, index), torch.bool)
        grad = b.where(skipped, b.scalar(0, grad), grad)
    zeros = b.expand(b.constant(0, grad.dtype), [rows, width])
    return b.op("ScatterND", zeros, index, grad, reduction="add")


def _gather(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, index = a["self"], a["index"]
    return b.op("GatherElements", x, index, shape=index.shape, axis=a["dim"] % len(x.shape))


def _scatter(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, index = a["self"], a["index"]
    source = a.get("src")
    if source is None:
        source = b.expand(b.scalar(a["value"], x), index.shape)
    source = b.cast(source, x.dtype)
    for dim, size in enumerate(index.shape):
        source = b.slice(source, dim, 0, size)
    return b.op("ScatterElements", x, index, source, axis=a["dim"] % len(x.shape))


def _scatter_add(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, index, source = a["self"], a["index"], a["src"]
    for dim, size in enumerate(index.shape):
        source = b.slice(source, dim, 0, size)
    axis = a["dim"] % len(x.shape)
    return b.op("ScatterElements", x, index, source, axis=axis, reduction="add")


def _index_select(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return _gathered(b, a["self"], a["index"], a["dim"] % len(a["self"].shape))


def _indexed_dims(indices: Sequence[Any]) -> list[int]:
    """Dims with an index. Raises Declined for masks, whose result has no fixed shape."""
    if any(isinstance(i, OnnxValue) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise Declined("its result has as many rows as a mask is true")
    return [d for d, i in enumerate(indices) if i is not None]


def _joined(b: Builder, indices: Sequence[OnnxValue]) -> OnnxValue:
    """Indices broadcast against one another, stacked on a new last dim."""
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    parts = [b.cast(b.expand(i, shape), torch.int64) for i in indices]
    return b.concat([b.reshape(p, [*shape, 1]) for p in parts], len(shape))


def _index(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """x[i, j, :]: indexed dims moved to the front, gathered, and the remaining dims moved back."""
    x, indices = a["self"], a["indices"]
    dims = _indexed_dims(indices)
    if len(dims) == 1:
        return _gathered(b, x, indices[dims[0]], dims[0])
    rest = [d for d in range(len(x.shape)) if d not in dims]
    joined = _joined(b, [indices[d] for d in dims])
    front = b.transpose(x, [*dims, *rest])
    match = joined.shape[:-1]
    shape = [*match, *(x.shape[d] for d in rest)]
    result = b.op("GatherND", front, joined, shape=shape)
    if dims != list(range(dims[0], dims[0] + len(dims))) or dims[0] == 0:
        return result  # separate indices: torch puts their dims first
    count = len(match)
    before = list(range(count, count + dims[0]))
    after = list(range(count + dims[0], len(shape)))
    return b.transpose(result, [*before, *range(count), *after])


def _index_put(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, indices, values = a["self"], a["indices"], a["values"]
    dims = _indexed_dims(indices)
    if dims != list(range(len(dims))):
        raise Declined("the indexed dims are not the first")
    joined = _joined(b, [indices[d] for d in dims])
    shape = [*joined.shape[:-1], *x.shape[len(dims) :]]
    values = b.expand(b.cast(values, x.dtype), shape)
    return b.op("ScatterND", x, joined, values, reduction="add" if a["accumulate"] else "none")


OPS: Translations = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter_add,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
}
