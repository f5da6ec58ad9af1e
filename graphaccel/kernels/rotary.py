"""Rotary position embedding, the two halves of a head turned against each other.

    y₁ = x₁ cos₁ − x₂ sin₁        y₂ = x₂ cos₂ + x₁ sin₂              (and back: the transpose)

Su et al., RoFormer, 2021, §3.4.2, in the layout of GPT-NeoX. Nothing but the tables is kept for the
backward. Bytes an element at 16 bits: 4 + 4; eager 20 + 28 (a concatenation of halves, then two
products and a sum).
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.kernels.fusion import T, fusion


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _turned_by_chunks(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


@fusion
class rotary:
    """x * cos + rotate_half(x) * sin, for x [..., s, d]."""

    inputs = {
        "x": T("... s d"),
        "cos": T("... s d", grad=False, broadcast=True),
        "sin": T("... s d", grad=False, broadcast=True),
    }
    outputs = {"y": T("... s d")}
    whole = ("d",)
    sizes = {"d": (8, 16)}
    patterns = (
        lambda x, cos, sin: x * cos + _turned(x) * sin,
        lambda x, cos, sin: x * cos + _turned_by_chunks(x) * sin,
    )
    negatives = (
        lambda x, cos, sin: x * cos - _turned(x) * sin,
        lambda x, cos, sin: x * cos + torch.cat(_split(x)[::-1], dim=-1) * sin,
    )

    def forward(x, cos, sin):
        y = x * cos
        (a, b), (u, v), (s, t) = _split(x), _split(y), _split(sin)
        u.addcmul_(b, s, value=-1)
        v.addcmul_(a, t)
        return y

    def backward(grad_y, cos, sin):
        dx = grad_y * cos
        (a, b), (u, v), (s, t) = _split(grad_y), _split(dx), _split(sin)
        u.addcmul_(b, t)
        v.addcmul_(a, s, value=-1)
        return dx

    def fake(x, cos, sin):
        return x * cos

    def legal(x, cos, sin):
        if x.shape[-1] % 2:
            return f"a head of {x.shape[-1]} has no halves"
        if cos.dtype != sin.dtype or cos.dtype not in (x.dtype, torch.float32):
            return "its tables are neither in the dtype of x nor in float32"
        return None
