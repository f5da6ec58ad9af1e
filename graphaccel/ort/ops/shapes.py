"""Views, and ops that move elements without computing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, OnnxValue, Translate, Translations

aten = torch.ops.aten


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _view(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return b.reshape(a["self"], _shape(node))


def _same(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return a["self"]


def _expand(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return b.expand(a["self"], _shape(node))


def _permute(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    rank = len(a["self"].shape)
    return b.transpose(a["self"], [d % rank for d in a["dims"]])


def _transpose(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    rank = len(a["self"].shape)
    if rank < 2:
        return a["self"]
    order = list(range(rank))
    first, second = a.get("dim0", 0) % rank, a.get("dim1", 1) % rank
    order[first], order[second] = order[second], order[first]
    return b.transpose(a["self"], order)


def _bounds(size: int, start: Any, stop: Any) -> tuple[int, int]:
    """Python's rules for the ends of a slice."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


def _slice(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = a["self"]
    dim = a["dim"] % len(x.shape)
    return b.slice(x, dim, *_bounds(x.shape[dim], a["start"], a["end"]), a["step"])


def _select(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = a["self"]
    dim = a["dim"] % len(x.shape)
    index = a["index"] % x.shape[dim]
    return b.reshape(b.slice(x, dim, index, index + 1), _shape(node))


def _cat(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    dtype = node.meta["val"].dtype
    xs = [b.cast(x, dtype) for x in a["tensors"]]
    return b.concat(xs, a["dim"] % len(_shape(node)))


def _stack(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    shape = _shape(node)
    dim = a["dim"] % len(shape)
    one = [1 if i == dim else n for i, n in enumerate(shape)]
    return b.concat([b.reshape(x, one) for x in a["tensors"]], dim)


def _split(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    x = a["self"]
    dim = a["dim"] % len(x.shape)
    pieces, start = [], 0
    for value in node.meta["val"]:
        size = value.shape[dim]
        pieces.append(b.slice(x, dim, start, start + size))
        start += size
    return pieces


def _unbind(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    x = a["self"]
    dim = a["dim"] % len(x.shape)
    shapes = [tuple(v.shape) for v in node.meta["val"]]
    return [b.reshape(b.slice(x, dim, i, i + 1), s) for i, s in enumerate(shapes)]


def _triangle(upper: bool) -> Translate:
    def translate(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
        x, diagonal = a["self"], a["diagonal"]
        rows, columns = x.shape[-2:]
        ones = torch.ones(rows, columns, dtype=torch.bool)
        kept = ones.triu(diagonal) if upper else ones.tril(diagonal)
        return b.where(b.constant(kept.numpy(), torch.bool), x, b.constant(0, x.dtype))

    return translate


def _zeros(b: Builder, shape: Sequence[int], dtype: torch.dtype) -> OnnxValue:
    return b.expand(b.constant(0, dtype), shape)


def _pad(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    """Constant padding; torch lists it from the last dim on, negative amounts crop."""
    x = a["self"]
    rank = len(x.shape)
    value = b.constant(a["value"], x.dtype)
    for i in range(len(a["pad"]) // 2):
        before, after = a["pad"][2 * i : 2 * i + 2]
        dim = rank - 1 - i
        x = b.slice(x, dim, max(0, -before), x.shape[dim] - max(0, -after))
        x = _padded(b, x, dim, max(0, before), max(0, after), value)
    return x


def _padded(
    b: Builder, x: OnnxValue, dim: int, before: int, after: int, value: OnnxValue
) -> OnnxValue:
    def block(size: int) -> OnnxValue:
        return b.expand(value, [size if i == dim else n for i, n in enumerate(x.shape)])

    parts = [block(before)] if before else []
    parts += [x] + ([block(after)] if after else [])
    return b.concat(parts, dim)


def _slice_scatter(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return _written(b, a["self"], a["src"], a["dim"], a["start"], a["end"], a["step"])


def _written(
    b: Builder, x: OnnxValue, source: OnnxValue, dim: int, start: Any, stop: Any, step: int
) -> OnnxValue:
    """`x` with a slice of it replaced by `source`."""
    dim %= len(x.shape)
    first, last = _bounds(x.shape[dim], start, stop)
    if step == 1:
        parts = [b.slice(x, dim, 0, first)] if first else []
        parts.append(source)
        if last < x.shape[dim]:
            parts.append(b.slice(x, dim, last, x.shape[dim]))
        return b.concat(parts, dim)
    places = torch.arange(first, last, step)
    shape = [len(places) if i == dim else 1 for i in range(len(x.shape))]
    index = b.constant(places.view(shape).numpy(), torch.int64)
    where = b.expand(index, source.shape)
    return b.op("ScatterElements", x, where, source, axis=dim)


def _select_scatter(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = a["self"]
    dim = a["dim"] % len(x.shape)
    index = a["index"] % x.shape[dim]
    source = b.reshape(a["src"], [1 if i == dim else n for i, n in enumerate(x.shape)])
    return _written(b, x, source, dim, index, index + 1, 1)


def _select_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    shape, grad = _shape(node), a["grad_output"]
    dim = a["dim"] % len(shape)
    index = a["index"] % shape[dim]
    one = b.reshape(grad, [1 if i == dim else n for i, n in enumerate(shape)])
    after = shape[dim] - index - 1
    return _padded(b, one, dim, index, after, b.constant(0, grad.dtype))


def _slice_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    shape, grad = _shape(node), a["grad_output"]
    dim = a["dim"] % len(shape)
    first, last = _bounds(shape[dim], a["start"], a["end"])
    if a["step"] == 1:
        return _padded(b, grad, dim, first, shape[dim] - last, b.constant(0, grad.dtype))
    return _written(b, _zeros(b, shape, grad.dtype), grad, dim, first, last, a["step"])


def _flip(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x = a["self"]
    for dim in a["dims"]:
        index = b.integers(range(x.shape[dim] - 1, -1, -1))
        x = b.op("Gather", x, index, axis=dim % len(x.shape))
    return x


def _roll(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, dims = a["self"], a["dims"]
    if not dims:  # all dims as one
        x, dims = b.reshape(x, [prod(x.shape)]), [0]
    for shift, dim in zip(a["shifts"], dims, strict=True):
        dim %= len(x.shape)
        size = x.shape[dim]
        cut = -shift % size
        if cut:
            x = b.concat([b.slice(x, dim, cut, size), b.slice(x, dim, 0, cut)], dim)
    return b.reshape(x, _shape(node))


def _repeat(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, repeats = a["self"], a["repeats"]
    x = b.reshape(x, [1] * (len(repeats) - len(x.shape)) + list(x.shape))
    return b.op("Tile", x, b.integers(repeats), shape=_shape(node))


OPS: Translations = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.tril.default: _triangle(upper=False),
    aten.triu.default: _triangle(upper=True),
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
    aten.flip.default: _flip,
    aten.roll.default: _roll,
    aten.repeat.default: _repeat,
}
