"""Scaled dot-product attention, taken apart: ONNX Runtime has no gradient of a fused one.

Vaswani et al., Attention Is All You Need, 2017; the backward from the saved logarithm of the
normaliser is that of Dao et al., FlashAttention, 2022, algorithm 4.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, Declined, Translations, Value
from graphaccel.ort.ops.products import swap_last

aten = torch.ops.aten


def _scores(b: Builder, a: Arguments) -> Value:
    """q kᵀ scale + mask, [batch, heads, queries, keys]."""
    q, k, mask = a["query"], a["key"], a["attn_mask"]
    if a["dropout_p"]:
        raise Declined("it draws random numbers")
    product = b.matmul(q, swap_last(b, k))
    scores = b.binary("Mul", product, b.scalar(_scale(a), product))
    if a["is_causal"]:
        rows, columns = scores.shape[-2:]
        below = torch.ones(rows, columns, dtype=torch.bool).tril()
        low = b.scalar(-math.inf, scores)
        scores = b.where(b.constant(below.numpy(), torch.bool), scores, low)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return b.where(mask, scores, b.scalar(-math.inf, scores))
    return b.binary("Add", scores, mask)


def _scale(a: Arguments) -> float:
    return 1 / math.sqrt(a["query"].shape[-1]) if a["scale"] is None else a["scale"]


def _attention(b: Builder, node: fx.Node, a: Arguments) -> list[Value]:
    """Result and log Σ exp of each row's scores; a row without any key gives zeros."""
    scores = _scores(b, a)
    largest = b.reduce("ReduceMax", scores, [3], True)
    empty = b.binary("Equal", largest, b.scalar(-math.inf, largest), torch.bool)
    safe = b.where(empty, b.scalar(0, largest), largest)
    power = b.op("Exp", b.binary("Sub", scores, safe))
    total = b.reduce("ReduceSum", power, [3], True)
    total = b.where(empty, b.scalar(1, total), total)
    weights = b.binary("Div", power, total)
    log = b.binary("Add", b.op("Log", total), safe)
    log = b.where(empty, largest, log)
    result = b.matmul(weights, a["value"])
    return [result, b.reshape(log, scores.shape[:-1])]


def _attention_backward(b: Builder, node: fx.Node, a: Arguments) -> list[Value]:
    grad, out, v = a["grad_out"], a["out"], a["value"]
    scores = _scores(b, a)
    log = b.reshape(a["logsumexp"], [*scores.shape[:-1], 1])
    empty = b.binary("Equal", log, b.scalar(-math.inf, log), torch.bool)
    weights = b.op("Exp", b.binary("Sub", scores, b.where(empty, b.scalar(0, log), log)))
    grad_v = b.matmul(swap_last(b, weights), grad)
    delta = b.reduce("ReduceSum", b.binary("Mul", grad, out), [3], True)
    inner = b.binary("Sub", b.matmul(grad, swap_last(b, v)), delta)
    slope = b.binary("Mul", b.binary("Mul", weights, inner), b.scalar(_scale(a), inner))
    return [b.matmul(slope, a["key"]), b.matmul(swap_last(b, slope), a["query"]), grad_v]


OPS: Translations = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
