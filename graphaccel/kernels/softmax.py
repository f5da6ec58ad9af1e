"""Attention scores: scale, mask and softmax as one op, and whole attention as torch's.

    y = softmax(x · scale + mask)            dx = scale · y · (dy − Σ dy · y)

Computed in float32 for 16-bit inputs. Kept for the backward: y. Bytes an element at 16 bits: 4 + 6;
eager 28 + 28 with an upcast. Where nothing else reads the scores, attention as a whole is
`scaled_dot_product_attention`, which never writes them.
"""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.spec import Function

aten = torch.ops.aten


def _scaled(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide * scale if mask is None else torch.add(mask.to(wide.dtype), wide, alpha=scale)


_MASKED = float("-inf")


def _spellings(*scores: Function, after: Function | None = None) -> tuple[Function, ...]:
    """Patterns of a softmax over scores, a function of inputs by name: as it is; of scores cast to
    float32; and by softmax in float32. after: what is done with it, a function of it and them."""
    soft = (
        lambda s, kind: torch.softmax(s, -1),
        lambda s, kind: torch.softmax(s.float(), -1).to(kind),
        lambda s, kind: torch.softmax(s, -1, dtype=torch.float32).to(kind),
    )

    def pattern(score: Function, turn: Function) -> Function:
        def call(**given: Any) -> Tensor:
            kind = given["x" if after is None else "q"].dtype
            read = {n: given[n] for n in signature(score).parameters}
            made = turn(score(**read), kind)
            return made if after is None else after(made, given["v"])

        known = dict(signature(score).parameters)
        if after is not None:
            known["v"] = Parameter("v", Parameter.POSITIONAL_OR_KEYWORD)
        call.__signature__ = Signature(list(known.values()))  # type: ignore[attr-defined]
        return call

    return tuple(pattern(score, turn) for score in scores for turn in soft)


@fusion
class scale_mask_softmax:
    """softmax(x * scale + mask) over the last dim."""

    inputs = {
        "x": T("... q k"),
        "mask": T("... q k", optional=True, grad=False, mask=True),
        "scale": Scalar(1.0, (0.125,)),
    }
    outputs = {"y": T("... q k")}
    whole = ("k",)
    patterns = _spellings(
        lambda x, mask, scale: x * scale + mask,
        lambda x, mask: x + mask,
        lambda x, scale: x * scale,
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


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2))


@fusion
class attention:
    """matmul(softmax(q · kᵀ * scale + mask), v) as scaled_dot_product_attention."""

    inputs = {
        "q": T("b h q d"),
        "k": T("b h s d"),
        "v": T("b h s e"),
        "mask": T("b h q s", optional=True, mask=True),
        "bias": T("b h q s", optional=True, mask=True),
        "hidden": T("b h q s", optional=True, grad=False, broadcast=True, dtype="bool"),
        "scale": Scalar(1.0, (0.125,)),
    }
    outputs = {"y": T("b h q e")}
    sizes = {"d": (8, 16), "e": (8, 16)}
    large = 20.0  # products of two of them are what the softmax sees
    tolerance = 4.0  # torch's kernel, not ours
    # A row that is -inf throughout is NaN in eager, and 0 or NaN in torch's; of one hidden by a large
    # number, torch's CPU kernel gives the even weights of eager, but not their gradient.
    masked_rows = False
    patterns = _spellings(
        lambda q, k, mask, scale: _scores(q, k) * scale + mask,
        lambda q, k, mask: _scores(q, k) + mask,
        lambda q, k, bias, mask, scale: _scores(q, k) * scale + bias + mask,
        lambda q, k, hidden, scale: (_scores(q, k) * scale).masked_fill(hidden, _MASKED),
        lambda q, k, scale: _scores(q, k) * scale,
        lambda q, k: _scores(q, k),
        after=torch.matmul,
    )
    negatives = (
        lambda q, k, v, mask, scale: torch.matmul(
            torch.softmax(_scores(q, k) * scale + mask, -2), v
        ),
        lambda q, k, v, scale: torch.matmul(torch.sigmoid(_scores(q, k) * scale), v),
    )

    def rewrite(q, k, v, mask, bias, hidden, scale):
        mask = mask if bias is None else bias + mask
        if hidden is not None:
            mask = ~hidden
        elif mask is not None and mask.dtype != q.dtype:  # under autocast it is still wide
            mask = mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)  # -inf would make NaN
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
