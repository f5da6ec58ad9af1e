"""Losses and their gradients."""

from __future__ import annotations

import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, Declined, OnnxValue, Translations

aten = torch.ops.aten
MEAN, SUM = 1, 2


def _labels(b: Builder, a: Arguments) -> tuple[OnnxValue, OnnxValue, OnnxValue]:
    """(labels with the ignored ones as 0, [N, 1]; whether each counts, [N]; its weight, [N])."""
    x, target = a["self"], a["target"]
    if len(x.shape) != 2:
        raise Declined(f"it has {len(x.shape)} dims")
    ignored = b.binary("Equal", target, b.scalar(a["ignore_index"], target), torch.bool)
    safe = b.where(ignored, b.scalar(0, target), target)
    counted = b.op("Not", ignored)
    weight = b.cast(counted, x.dtype)
    if a["weight"] is not None:
        looked_up = b.op("Gather", a["weight"], safe, shape=safe.shape, axis=0)
        weight = b.binary("Mul", weight, looked_up)
    return b.reshape(safe, [x.shape[0], 1]), counted, weight


def _nll_loss(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    x = a["self"]
    safe, _, weight = _labels(b, a)
    picked = b.op("GatherElements", x, safe, shape=safe.shape, axis=1)
    losses = b.op("Neg", b.binary("Mul", b.reshape(picked, [x.shape[0]]), weight))
    if a["reduction"] not in (MEAN, SUM):
        return [losses, b.constant(0, x.dtype)]
    total = b.reduce("ReduceSum", weight, [0], False)
    loss = b.reduce("ReduceSum", losses, [0], False)
    return [b.binary("Div", loss, total) if a["reduction"] == MEAN else loss, total]


def _nll_loss_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    x, grad = a["self"], a["grad_output"]
    safe, _, weight = _labels(b, a)
    if a["reduction"] == MEAN:
        grad = b.binary("Div", grad, a["total_weight"])
    each = b.op("Neg", b.binary("Mul", weight, grad))
    zeros = b.expand(b.constant(0, x.dtype), x.shape)
    return b.op("ScatterElements", zeros, safe, b.reshape(each, safe.shape), axis=1)


def _mse_loss(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    difference = b.binary("Sub", a["self"], a["target"])
    square = b.binary("Mul", difference, difference)
    return _reduced(b, square, a["reduction"])


def _reduced(b: Builder, x: OnnxValue, reduction: int) -> OnnxValue:
    kind = {MEAN: "ReduceMean", SUM: "ReduceSum"}.get(reduction)
    return x if kind is None else b.reduce(kind, x, range(len(x.shape)), False)


def _mse_loss_backward(b: Builder, node: fx.Node, a: Arguments) -> OnnxValue:
    difference = b.binary("Sub", a["self"], a["target"])
    factor = 2.0 / node.meta["val"].numel() if a["reduction"] == MEAN else 2.0
    grad = b.binary("Mul", a["grad_output"], b.scalar(factor, difference))
    return b.binary("Mul", difference, grad)


OPS: Translations = {
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.mse_loss.default: _mse_loss,
    aten.mse_loss_backward.default: _mse_loss_backward,
}
