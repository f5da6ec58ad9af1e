"""CUDA kernels for the attention op of captured graphs, which torch has for the CPU only.

    y, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

With a CUDA kernel it is the same op on any device: one graph, one sharding rule, one plan. y =
softmax(q · kᵀ * scale + mask) · v; total is the logarithm of the softmax's denominator. Computed by
FlashAttention (Dao, 2023) where there is no mask, by the memory-efficient kernel (Rabe and Staats,
2021) for masks and float32; decomposed where neither supports it (float64, heads whose rows are not
multiples of 16 bytes).
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

aten = torch.ops.aten
_QUERIES = 32  # the memory-efficient kernel stores sums for multiples of this many queries
_ALIGNED = 16  # bytes, alignment of a row of the mask
_WIDEST = 256  # largest head dim of FlashAttention


@cache
def attention_on_gpu() -> torch.library.Library:
    """Register CUDA kernels for the CPU's op, once per process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention_for_cpu", attention, "CUDA")
    backward = "_scaled_dot_product_flash_attention_for_cpu_backward"
    library.impl(backward, attention_backward, "CUDA")
    return library


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q · kᵀ * scale + mask) · v, like q, and the log-sum-exp of its softmax: [b, h, q],
    float32 (float64 for float64). q: [b, h, q, d]; k, v: [b, h or fewer, s, d]; attn_mask: like [b,
    h, q, s], added."""
    assert dropout_p == 0.0  # graphs captured on a CPU have the dropout mask decomposed
    given = readable(q), readable(k), readable(v)
    y, total = _attention(*given, is_causal, attn_mask, scale)
    sums = total.new_empty(total.shape[0], total.shape[2], total.shape[1]).transpose(1, 2)
    return _laid(y, torch.empty_like(q)), _laid(total, sums)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    if _flash_takes(q, attn_mask):
        y, total = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )[:2]
        return y, total
    if not _efficient_takes(q):
        return _spelled_out(q, k, v, is_causal, attn_mask, scale)
    k, v = (_for_heads(t, q.shape[1]) for t in (k, v))
    bias = _aligned(attn_mask, q, k)
    y, total, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, is_causal, scale=scale
    )
    return y, total[..., : q.shape[2]]


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    total: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, of the shapes of these. total: as returned by `attention`."""
    assert dropout_p == 0.0
    read = readable(grad), readable(q), readable(k), readable(v), readable(y)
    given = _backward(*read, total.contiguous(), is_causal, attn_mask, scale)
    built = []
    for gradient, of in zip(given, (q, k, v), strict=True):
        b, h, s, d = of.shape
        built.append(_laid(gradient, of.new_empty(b, s, h, d).transpose(1, 2)))
    return built[0], built[1], built[2]


def readable(x: Tensor) -> Tensor:
    """With rows that start at multiples of 16 bytes, without overlap: kernels read others
    incorrectly."""
    *steps, last = x.stride()
    starts = (*steps, x.storage_offset())
    plain = last == 1 and 0 not in steps and all(s * x.itemsize % _ALIGNED == 0 for s in starts)
    return x if plain else x.clone(memory_format=torch.contiguous_format)


def _laid(x: Tensor, like: Tensor) -> Tensor:
    """In the memory layout that the op has on a CPU, which the graph relies on: mostly tokens
    before heads."""
    if x.stride() == like.stride():
        return x
    tokens_first = like.transpose(1, 2)
    if tokens_first.is_contiguous():
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous() if like.is_contiguous() else like.copy_(x)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    total: Tensor,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if _flash_takes(q, attn_mask):
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, y, total, None, None, q.shape[2], k.shape[2], 0.0, is_causal, none, none,
            scale=scale,
        )  # fmt: skip
    if not _efficient_takes(q):
        return _spelled_out_backward(grad, q, k, v, y, total, is_causal, attn_mask, scale)
    key, value = (_for_heads(t, q.shape[1]) for t in (k, v))
    bias = _aligned(attn_mask, q, key)
    missing = -total.shape[2] % _QUERIES
    sums = torch.nn.functional.pad(total, (0, missing), value=math.inf) if missing else total
    none = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, key, value, bias, y, sums, none, none, 0.0, [True, True, True, False], is_causal,
        scale=scale,
    )  # fmt: skip
    return dq, _for_groups(dk, k.shape[1]), _for_groups(dv, v.shape[1])


def _flash_takes(q: Tensor, mask: Tensor | None) -> bool:
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return narrow and mask is None and q.shape[3] % 8 == 0 and q.shape[3] <= _WIDEST


def _efficient_takes(q: Tensor) -> bool:
    return q.dtype != torch.float64 and q.shape[3] * q.dtype.itemsize % _ALIGNED == 0


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values of grouped queries, repeated for each head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _for_groups(x: Tensor, groups: int) -> Tensor:
    """The transpose of `_for_heads`, for gradients: the sum over the heads of a group."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask for every head and query, in the dtype of q, with rows that start at multiples of 16
    bytes as the kernel requires."""
    if mask is None:
        return None
    mask, count = mask.to(q.dtype), k.shape[2]
    missing = -count % (_ALIGNED // q.dtype.itemsize)
    if mask.shape[-1] != count:
        mask = mask.expand(*mask.shape[:-1], count)
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :count]
    elif mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], count)


def _weights(
    q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Scores [b, h, q, s] in float32, or float64, before the softmax."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * factor
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    if is_causal:
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(after, -math.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _spelled_out(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    key, value = (_for_heads(_wide(t), q.shape[1]) for t in (k, v))
    scores = _weights(_wide(q), key, is_causal, mask, scale)
    total = scores.logsumexp(-1)
    return ((scores - total[..., None]).exp() @ value).to(q.dtype), total


def _spelled_out_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    total: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, slope = _wide(q), _wide(grad)
    key, value = (_for_heads(_wide(t), q.shape[1]) for t in (k, v))
    factor = q.shape[3] ** -0.5 if scale is None else scale
    weights = (_weights(wide, key, is_causal, mask, scale) - total[..., None]).exp()
    own = (slope * _wide(y)).sum(-1, keepdim=True)
    scores = weights * (slope @ value.transpose(-1, -2) - own) * factor
    dv = _for_groups(weights.transpose(-1, -2) @ slope, v.shape[1])
    dk = _for_groups(scores.transpose(-1, -2) @ wide, k.shape[1])
    return (scores @ key).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
