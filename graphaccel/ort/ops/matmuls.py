"""Matmuls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, OnnxValue, Translations

aten = torch.ops.aten


def _mm(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    return b.matmul(a["self"], a["mat2"])


def _addmm(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    (left, turn), (right, other) = b.untransposed(a["mat1"]), b.untransposed(a["mat2"])
    return b.op(
        "Gemm",
        left,
        right,
        a["self"],
        shape=tuple(node.meta["val"].shape),
        transA=int(turn),
        transB=int(other),
        alpha=float(a["alpha"]),
        beta=float(a["beta"]),
    )


def _baddbmm(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    product = b.matmul(a["batch1"], a["batch2"])
    if a["alpha"] != 1:
        product = b.binary("Mul", product, b.scalar(a["alpha"], product))
    added = a["self"]
    if a["beta"] == 0:
        return product
    if a["beta"] != 1:
        added = b.binary("Mul", added, b.scalar(a["beta"], added))
    return b.binary("Add", product, added)


def swap_last(b: Builder, x: OnnxValue) -> OnnxValue:
    """Swap the last two dims."""
    order = list(range(len(x.shape)))
    order[-2:] = order[-1], order[-2]
    return b.transpose(x, order)


def sum_to(b: Builder, x: OnnxValue, shape: Sequence[int]) -> OnnxValue:
    """Sum over dims that were broadcast, so that `x` has `shape` again."""
    extra = len(x.shape) - len(shape)
    x = b.reduce("ReduceSum", x, range(extra), keep=False) if extra else x
    dims = [i for i, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m]
    return b.reduce("ReduceSum", x, dims, keep=True)


OPS: Translations = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
}
