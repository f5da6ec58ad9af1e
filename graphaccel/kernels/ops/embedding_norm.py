"""Embedding lookup, adds and layer norm as one op: the start of BERT.

    total = table[ids] + first (+ second)          y = layer norm of total

`first` and `second` are the embeddings of positions and types; their leading dims may be broadcast.
The rows of the table go directly into the norm. Bytes per element at 16 bits: forward 8 (two rows
read, two written), eager 14; the backward is that of a norm after an add, and the scatter into the
table's gradient.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.ops import layer_norm as layer
from graphaccel.kernels.ops.row_norm import launch_backward, launch_forward, widest

aten = torch.ops.aten


def _summed(
    ids: Tensor, table: Tensor, first: Tensor, second: Tensor | None, padding: int
) -> Tensor:
    total = aten.embedding(table, ids, padding) + first
    return (total if second is None else total + second).contiguous()


def _into(table: Tensor, dx: Tensor, ids: Tensor, padding: int) -> Tensor:
    """The gradient of the table: rows of dx summed by their ids."""
    grad = aten.embedding_dense_backward(dx, ids, table.shape[0], padding, False)
    return grad.to(table.dtype)


def bounded(ids: Tensor, table: Tensor, padding: int) -> Tensor:
    """The ids, with those out of the table's bounds replaced by padding: torch's CUDA kernel writes
    wherever they point, and padding gets no gradient."""
    return torch.where((ids >= 0) & (ids < len(table)), ids, padding)


def _kind(table: Tensor, first: Tensor, second: Tensor | None) -> torch.dtype:
    kind = torch.promote_types(table.dtype, first.dtype)
    return kind if second is None else torch.promote_types(kind, second.dtype)


def _one(ids, table, first, weight, bias, padding, eps):
    total = aten.embedding(table, ids, padding) + first
    return total, layer.of_torch(total, weight, bias, eps)


def _two(ids, table, first, second, weight, bias, padding, eps):
    total = aten.embedding(table, ids, padding) + first + second
    return total, layer.of_torch(total, weight, bias, eps)


@fusion
class embedding_layer_norm:
    """total = table[ids] + first + second; y = layer norm of total."""

    inputs = {
        "ids": T("...", below="v", ignored=False),
        "table": T("v d"),
        "first": T("... d", broadcast=True),
        "second": T("... d", broadcast=True, optional=True),
        "weight": T("d"),
        "bias": T("d"),
        "padding": Scalar(-1, (0,)),
        "eps": layer.EPS,
    }
    outputs = {
        "total": T("... d", optional=True, dtype="table"),
        "y": T("... d", dtype="table"),
    }
    saved = {"mean": T("... 1", dtype="wide"), "r": T("... 1", dtype="wide")}
    gradients = {"second": "first"}
    whole = ("v", "d")
    gathered = ("table",)
    tensor_parallel = False  # a tensor axis shards the vocabulary
    devices = ("cuda",)
    patterns = (_one, _two)
    negatives = (
        lambda ids, table, first, weight, bias, padding, eps: (
            aten.embedding(table, ids, padding) - first,
            layer.of_torch(aten.embedding(table, ids, padding) - first, weight, bias, eps),
        ),
    )

    def forward(ids, table, first, second, weight, bias, padding, eps):
        total = _summed(ids, table, first, second, padding)
        return total, *layer.normed(total, weight, bias, eps)

    def fake(ids, table, first, second, weight, bias, padding, eps):
        shape = (*ids.shape, table.shape[-1])
        total = table.new_empty(shape, dtype=_kind(table, first, second))
        return total, *layer.fake_norm(total, weight, bias, eps)

    def backward(grad_total, grad_y, ids, table, total, weight, bias, mean, r, padding, wanted):
        some = (wanted[4], wanted[5])
        dx, dweight, dbias = layer.gradients(grad_y, total, weight, bias, mean, r, some)
        dx = (dx if grad_total is None else dx.add_(grad_total)).to(total.dtype)
        dtable = _into(table, dx, ids, padding) if wanted[1] else None
        return dtable, dx, dweight, dbias

    def cuda_forward(ids, table, first, second, weight, bias, padding, eps):
        built = launch_forward(
            table, weight, bias, eps, centres=True, out=_kind(table, first, second),
            residual=first, more=second, ids=ids,
        )  # fmt: skip
        return built.total, built.y, built.mean, built.r

    def cuda_backward(
        grad_total, grad_y, ids, table, total, weight, bias, mean, r, padding, wanted
    ):
        some = (wanted[4], wanted[5])
        if total.shape[-1] > widest(True):
            dx, dweight, dbias = layer.gradients(grad_y, total, weight, bias, mean, r, some)
            dx = (dx if grad_total is None else dx.add_(grad_total)).to(total.dtype)
        else:
            built = launch_backward(
                grad_y, total, weight, bias, mean, r, grad_total=grad_total, wanted=some
            )
            dx, dweight, dbias = built.dx, built.dweight, built.dbias
        dtable = _into(table, dx, bounded(ids, table, padding), padding) if wanted[1] else None
        return dtable, dx, dweight, dbias

    def legal(ids, table, first, second, weight, bias, **_):
        total = torch.Size((*ids.shape, table.shape[-1]))
        for other in (first, second):
            if other is not None and torch.broadcast_shapes(total, other.shape) != total:
                return "what is added is larger than what is looked up"
        kind = _kind(table, first, second)
        if weight.dtype != kind or bias.dtype != kind:
            return "the sum, weight and bias have different dtypes"
        return layer.too_wide(table)
