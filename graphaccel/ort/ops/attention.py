"""Scaled dot-product attention, decomposed: ONNX Runtime has no gradient of a fused one.

Vaswani et al., Attention Is All You Need, 2017; the backward from the saved logarithm of the
normaliser is that of Dao et al., FlashAttention, 2022, algorithm 4.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import fx

from graphaccel.ort.builder import Arguments, Builder, Declined, OnnxValue, Translations
from graphaccel.ort.ops.matmuls import swap_last

aten = torch.ops.aten


def _scores(b: Builder, a: Arguments) -> OnnxValue:
    """q kᵀ scale + mask, [batch, heads, queries, keys]; masked scores are the lowest finite number,
    so that nothing is infinite."""
    q, k, mask = a["query"], a["key"], a["attn_mask"]
    if a["dropout_p"]:
        raise Declined("it draws random numbers")
    product = b.matmul(q, swap_last(b, k))
    scores = b.binary("Mul", product, b.scalar(_scale(a), product))
    lowest = torch.finfo(scores.dtype).min
    if a["is_causal"]:  # adding is four times as fast as `Where`
        rows, columns = scores.shape[-2:]
        above = np.triu(np.full((rows, columns), lowest), 1)
        scores = b.binary("Add", scores, b.constant(above, scores.dtype))
    if mask is None:
        return scores
    return b.binary("Add", scores, b.binary("Max", mask, b.scalar(lowest, mask)))


def _scale(a: Arguments) -> float:
    return 1 / math.sqrt(a["query"].shape[-1]) if a["scale"] is None else a["scale"]


def _attention(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    """Result and log Σ exp of each row's scores; a row without any key gives zeros, as torch's.

    With m the largest score of a row and p its weight: log Σ exp = m - log p.
    """
    scores, mask = _scores(b, a), a["attn_mask"]
    weights = b.op("Softmax", scores, axis=3)
    largest = b.reduce("ReduceMax", scores, [3], True)
    log = b.binary("Sub", largest, b.op("Log", b.reduce("ReduceMax", weights, [3], True)))
    result = b.matmul(weights, a["value"])
    if mask is not None:
        most = b.reduce("ReduceMax", mask, [len(mask.shape) - 1], True)
        empty = b.binary("Equal", most, b.scalar(-math.inf, most), torch.bool)
        some = b.cast(b.op("Not", empty), log.dtype)
        log, result = b.binary("Mul", log, some), b.binary("Mul", result, some)
    return [result, b.reshape(log, scores.shape[:-1])]


def _attention_backward(b: Builder, node: fx.Node, a: Arguments) -> list[OnnxValue]:
    grad, out, v = a["grad_out"], a["out"], a["value"]
    scores = _scores(b, a)
    log = b.reshape(a["logsumexp"], [*scores.shape[:-1], 1])
    weights = b.op("Exp", b.binary("Sub", scores, log))
    grad_v = b.matmul(swap_last(b, weights), grad)
    delta = b.reduce("ReduceSum", b.binary("Mul", grad, out), [3], True)
    inner = b.binary("Sub", b.matmul(grad, swap_last(b, v)), delta)
    slope = b.binary("Mul", b.binary("Mul", weights, inner), b.scalar(_scale(a), inner))
    return [b.matmul(slope, a["key"]), b.matmul(swap_last(b, slope), a["query"]), grad_v]


OPS: Translations = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
