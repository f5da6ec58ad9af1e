"""Fuses decomposed attention into torch's `scaled_dot_product_attention`.

    y = dropout(softmax(q · kᵀ · scale + mask)) · v

Torch's kernels for it (Dao, FlashAttention, 2022, §3.1) never write the scores: 4 bytes per score
fewer at 16 bits in every direction, or all of them; where torch has no kernel for a device, dtype
and mask it computes the formula above. Saved for the backward: q, k, v, y and a number per query.
The patterns are the common spellings: one mask added or T5's two, positions filled with -inf, a
scale that multiplies, divides, or is applied to q; softmax in the dtype of the scores or in
float32.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.ops.softmax import spellings

_MASKED = float("-inf")
# In 16 bits torch's CPU kernels decompose attention in float32 where a mask is learned.
_MASK = T("b h q s", optional=True, mask=True, low_grad=False)
_INPUTS = {
    "q": T("b h q d"),
    "k": T("b h s d"),
    "v": T("b h s e"),
    "mask": _MASK,
    "bias": _MASK,
    "hidden": T("b h q s", optional=True, grad=False, broadcast=True, dtype="bool"),
    "scale": Scalar(1.0, (0.125,)),
}


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2))


_SCORES = (
    lambda q, k, mask, scale: _scores(q, k) * scale + mask,
    lambda q, k, mask: _scores(q, k) + mask,
    lambda q, k, bias, mask, scale: _scores(q, k) * scale + bias + mask,
    lambda q, k, bias, mask: _scores(q, k) + bias + mask,
    lambda q, k, hidden, scale: (_scores(q, k) * scale).masked_fill(hidden, _MASKED),
    lambda q, k, hidden: _scores(q, k).masked_fill(hidden, _MASKED),
    lambda q, k, scale: _scores(q, k) * scale,
    lambda q, k: _scores(q, k),
)


def _weighed(p: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(p.to(v.dtype), v)


def _dropped(weights: Tensor, p: float) -> Tensor:
    """As captured: `nn.Dropout` in training."""
    return torch.native_dropout(weights, p, True)[0]


def _by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    p: float = 0.0,
) -> Tensor:
    mask = mask if bias is None or mask is None else bias + mask
    if hidden is not None:
        mask = ~hidden
    elif mask is not None and mask.dtype != q.dtype:  # under autocast it is still float32
        mask = _narrowed(mask, q.dtype)
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(q.shape[-2], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, scale=scale)


def _narrowed(mask: Tensor, kind: torch.dtype) -> Tensor:
    """The mask in another dtype; its lowest values stay finite: a row of only -inf would be NaN."""
    low = torch.finfo(kind).min
    if mask.is_floating_point() and torch.finfo(mask.dtype).min < low:
        mask = mask.clamp(min=low)
    return mask.to(kind)


@fusion
class attention:
    """matmul(softmax(q · kᵀ * scale + mask), v) as scaled_dot_product_attention."""

    inputs = _INPUTS
    outputs = {"y": T("b h q e")}
    sizes = {"d": (8, 16), "e": (8, 16)}
    large = 20.0  # products of two of them are the scores
    tolerance = 4.0  # torch's kernel, not ours
    compiled = True
    # A row that is entirely -inf is NaN in eager, and 0 or NaN in torch's kernels; for one masked
    # by a large number, torch's CPU kernel gives eager's even weights, but not their gradient.
    masked_rows = False
    patterns = spellings(*_SCORES, after=_weighed)
    negatives = (
        lambda q, k, v, mask, scale: torch.matmul(
            torch.softmax(_scores(q, k) * scale + mask, -2), v
        ),
        lambda q, k, v, scale: torch.matmul(torch.sigmoid(_scores(q, k) * scale), v),
    )
    rewrite = _by_torch


@fusion
class dropout_attention:
    """matmul(dropout(softmax(q · kᵀ * scale + mask)), v) as scaled_dot_product_attention."""

    inputs = {**_INPUTS, "p": Scalar(0.1, (0.5,))}
    outputs = {"y": T("b h q e")}
    sizes = {"d": (8, 16), "e": (8, 16)}
    large = 20.0
    tolerance = 4.0
    masked_rows = False
    random = True
    devices = ()  # on a CPU the mask is eager's; GPU kernels draw their own
    patterns = (
        *spellings(*_SCORES, after=lambda w, v, p: _weighed(_dropped(w.to(v.dtype), p), v)),
        # As under autocast, which casts before dropout.
        *spellings(*_SCORES, after=lambda w, v, p: _weighed(_dropped(w, p), v))[::3],
    )
    negatives = (
        lambda q, k, v, mask, scale, p: torch.matmul(
            _dropped(torch.softmax(_scores(q, k) * scale + mask, -2), p), v
        ),
        lambda q, k, v, scale, p: _dropped(
            torch.matmul(torch.softmax(_scores(q, k) * scale, -1), v), p
        ),
    )
    rewrite = _by_torch

    def legal(p, **_):
        return None if 0.0 <= p < 1.0 else f"a dropout of {p} keeps nothing"
