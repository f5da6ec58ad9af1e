"""Fused RMS normalisation, alone and after a residual add.

    r = 1 / sqrt(mean(x²) + eps)        y = x · r · w

    dx = r · (g − x · r² · mean(g · x))  with g = dy · w           dw = Σ dy · x · r

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, §4. Computed in float32 for 16-bit
inputs. Bytes per element at 16 bits: forward 4 (8 with the residual), backward 6 (8); eager moves
36 and 92 as written in transformers.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.ops.row_norm import WIDEST_FORWARD, launch_backward, launch_forward, widest

EPS = Scalar(1e-6, (1e-5,))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _factor(x: Tensor, eps: float) -> Tensor:
    """r of `[..., d]`, as `[..., 1]`; one pass over x without a temporary of its size."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def normed(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y in the dtype that x · w has, and r in float32 (float64 for float64)."""
    wide = _wide(x.contiguous())
    r = _factor(wide, eps)
    y = wide * r
    if weight is None:
        return y.to(x.dtype), r
    return y.mul_(weight).to(torch.promote_types(x.dtype, weight.dtype)), r


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, r: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """dx in float32 (float64), dw in the weight's dtype if wanted."""
    normal, dy = _wide(x.contiguous()) * r, _wide(grad.contiguous())
    if weight is None:
        mean = (dy * normal).sum(-1, keepdim=True).div_(x.shape[-1])
        return torch.addcmul(dy, normal, mean, value=-1).mul_(r), None
    weighted = dy * normal
    mean = (weighted @ weight.to(weighted.dtype)).div_(x.shape[-1]).unsqueeze(-1)
    dweight = weighted.flatten(0, -2).sum(0).to(weight.dtype) if wanted else None
    return (dy * weight).addcmul_(normal, mean, value=-1).mul_(r), dweight


def too_wide(x: Tensor) -> str | None:
    if x.shape[-1] > WIDEST_FORWARD:
        return f"rows of {x.shape[-1]} do not stay in registers"
    return None


def fake_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    kind = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape, dtype=kind), x.new_empty((*x.shape[:-1], 1), dtype=wide)


def _of_transformers(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LlamaRMSNorm and most others in transformers."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _scaled_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scaled before it is rounded (the original llama code, OLMo)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def _of_t5(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """T5LayerNorm: only the variance is computed in float32."""
    normal = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(weight.dtype)


def _squared(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _of_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, [x.shape[-1]], weight, eps)


SPELLINGS = (_of_transformers, _scaled_wide, _of_t5, _squared, _of_torch)


@fusion
class rms_norm:
    """y = x / rms(x) * weight over the last dim."""

    inputs = {"x": T("... d"), "weight": T("d", optional=True), "eps": EPS}
    outputs = {"y": T("... d")}
    saved = {"r": T("... 1", dtype="wide")}
    whole = ("d",)
    patterns = (
        *SPELLINGS,
        lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps),
    )
    negatives = (
        lambda x, weight, eps: weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + eps)),
        lambda x, weight, eps: weight * (x / (x.pow(2).mean(-1, keepdim=True) + eps)),
        lambda x, weight, eps: F.layer_norm(x, [x.shape[-1]], weight, None, eps),
    )
    forward = normed
    fake = fake_norm

    def backward(grad_y, x, weight, r, wanted):
        dx, dweight = gradients(grad_y, x, weight, r, wanted[1])
        return dx.to(x.dtype), dweight

    def cuda_forward(x, weight, eps):
        kind = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        built = launch_forward(x, weight, None, eps, centres=False, out=kind)
        return built.y, built.r

    def cuda_backward(grad_y, x, weight, r, wanted):
        if x.shape[-1] > widest(False):
            dx, dweight = gradients(grad_y, x, weight, r, wanted[1])
            return dx.to(x.dtype), dweight
        built = launch_backward(grad_y, x, weight, None, None, r, wanted=(wanted[1], False))
        return built.dx, built.dweight

    def legal(x, **_):
        return too_wide(x)


def _sum_first(normed):
    """The pattern of a norm after an add whose sum is also needed."""
    import inspect

    def pattern(x, residual, weight, eps):
        total = x + residual
        return total, normed(total, weight, eps)

    assert tuple(inspect.signature(normed).parameters) == ("x", "weight", "eps")
    return pattern


@fusion
class add_rms_norm:
    """total = x + residual; y = total / rms(total) * weight."""

    inputs = {
        "x": T("... d"),
        "residual": T("... d", broadcast=True),
        "weight": T("d"),
        "eps": EPS,
    }
    outputs = {"total": T("... d", optional=True), "y": T("... d")}
    saved = {"r": T("... 1", dtype="wide")}
    gradients = {"residual": "x"}
    whole = ("d",)
    patterns = tuple(_sum_first(normed) for normed in SPELLINGS)
    negatives = (
        lambda x, residual, weight, eps: (
            x - residual,
            _of_transformers(x - residual, weight, eps),
        ),
    )

    def forward(x, residual, weight, eps):
        total = (x + residual).contiguous()
        return total, *normed(total, weight, eps)

    def fake(x, residual, weight, eps):
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        return total, *fake_norm(total, weight, eps)

    def backward(grad_total, grad_y, total, weight, r, wanted):
        dx, dweight = gradients(grad_y, total, weight, r, wanted[2])
        if grad_total is not None:
            dx = dx.add_(grad_total)
        return dx.to(total.dtype), dweight

    def cuda_forward(x, residual, weight, eps):
        kind = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), weight.dtype)
        built = launch_forward(x, weight, None, eps, centres=False, out=kind, residual=residual)
        return built.total, built.y, built.r

    def cuda_backward(grad_total, grad_y, total, weight, r, wanted):
        if total.shape[-1] > widest(False):
            dx, dweight = gradients(grad_y, total, weight, r, wanted[2])
            dx = dx if grad_total is None else dx.add_(grad_total)
            return dx.to(total.dtype), dweight
        some = (wanted[2], False)
        built = launch_backward(
            grad_y, total, weight, None, None, r, grad_total=grad_total, wanted=some
        )
        return built.dx, built.dweight

    def legal(x, residual, **_):
        if torch.broadcast_shapes(x.shape, residual.shape) != x.shape:
            return "what is added is larger than x"
        return too_wide(x)
