"""Attention scores: scale, mask and softmax as one op, and whole attention as torch's.

    y = softmax(x · scale + mask)            dx = scale · y · (dy − Σ dy · y)

Computed in float32 for 16-bit inputs. Kept for the backward: y. Bytes an element at 16 bits: 4 + 6;
eager 28 + 28 with an upcast. Where nothing else reads the scores, attention as a whole is
`scaled_dot_product_attention`, which never writes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import Scalar, T, fusion

aten = torch.ops.aten


def _scaled(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide * scale if mask is None else torch.add(mask.to(wide.dtype), wide, alpha=scale)


@fusion
class scale_mask_softmax:
    """softmax(x * scale + mask) over the last dim."""

    inputs = {
        "x": T("... q k"),
        "mask": T("... q k", optional=True, grad=False, mask=True),
        "scale": Scalar(0.125, (1.0,)),
    }
    outputs = {"y": T("... q k")}
    whole = ("k",)
    patterns = (
        lambda x, mask, scale: torch.softmax(x * scale + mask, -1),
        lambda x, mask, scale: torch.softmax((x * scale + mask).float(), -1).to(x.dtype),
        lambda x, scale: torch.softmax(x * scale, -1),
        lambda x, scale: torch.softmax((x * scale).float(), -1).to(x.dtype),
    )
    negatives = (
        lambda x, mask, scale: torch.softmax(x * scale + mask, -2),
        lambda x, mask, scale: torch.log_softmax(x * scale + mask, -1),
    )

    def forward(x, mask, scale):
        return torch.softmax(_scaled(x, scale, mask), -1).to(x.dtype)

    def fake(x, mask, scale):
        return torch.softmax(x, -1)

    def backward(grad_y, y, scale):
        wide = grad_y.dtype in (torch.bfloat16, torch.float16)
        given, kept = (grad_y.float(), y.float()) if wide else (grad_y, y)
        return aten._softmax_backward_data(given, kept, -1, kept.dtype).mul_(scale).to(y.dtype)

    def fake_backward(grad_y, y, scale):
        return torch.empty_like(y)


def _probabilities(q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    return scores if mask is None else scores + mask


@fusion
class attention:
    """matmul(softmax(q · kᵀ * scale + mask), v) as scaled_dot_product_attention."""

    inputs = {
        "q": T("b h q d"),
        "k": T("b h s d"),
        "v": T("b h s e"),
        "mask": T("b h q s", optional=True, mask=True),
        "scale": Scalar(0.125),
    }
    outputs = {"y": T("b h q e")}
    sizes = {"d": (8, 16), "e": (8, 16)}
    large = 20.0  # products of two of them are what the softmax sees
    tolerance = 4.0  # torch's kernel, not ours
    masked_rows = False  # a row that is -inf throughout is NaN in eager, and 0 or NaN in torch's
    patterns = (
        lambda q, k, v, mask, scale: torch.matmul(
            torch.softmax(_probabilities(q, k, scale, mask), -1), v
        ),
        lambda q, k, v, mask, scale: torch.matmul(
            torch.softmax(_probabilities(q, k, scale, mask).float(), -1).to(q.dtype), v
        ),
        lambda q, k, v, scale: torch.matmul(torch.softmax(_probabilities(q, k, scale), -1), v),
        lambda q, k, v, scale: torch.matmul(
            torch.softmax(_probabilities(q, k, scale).float(), -1).to(q.dtype), v
        ),
    )
    negatives = (
        lambda q, k, v, mask, scale: torch.matmul(
            torch.softmax(_probabilities(q, k, scale, mask), -2), v
        ),
    )

    def rewrite(q, k, v, mask, scale):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
