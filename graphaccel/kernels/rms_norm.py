"""RMS normalisation, alone and after a residual sum.

    r = 1 / sqrt(mean(x²) + eps)        y = x · r · w

    dx = r · (g − x · r² · mean(g · x))  with g = dy · w           dw = Σ dy · x · r

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, §4. Computed in float32 for 16-bit
inputs. Bytes an element at 16 bits: forward 4 (8 with the residual), backward 6 (8); eager moves 36
and 92 for the spelling of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.jit import jit, next_power_of_2, processors, tl, warps

EPS = Scalar(1e-6, (1e-5,))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _factor(x: Tensor, eps: float) -> Tensor:
    """r of `[..., d]`, as `[..., 1]`; one pass over x and nothing of its size made."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y in the dtype that x · w has, and r in float32 (float64 for float64)."""
    wide = _wide(x.contiguous())
    r = _factor(wide, eps)
    y = wide * r
    if weight is None:
        return y.to(x.dtype), r
    return y.mul_(weight).to(torch.promote_types(x.dtype, weight.dtype)), r


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, r: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """dx in float32 (float64), dw in the weight's dtype if wanted."""
    normal, dy = _wide(x.contiguous()) * r, _wide(grad.contiguous())
    if weight is None:
        mean = (dy * normal).sum(-1, keepdim=True).div_(x.shape[-1])
        return torch.addcmul(dy, normal, mean, value=-1).mul_(r), None
    products = dy * normal
    mean = (products @ weight.to(products.dtype)).div_(x.shape[-1]).unsqueeze(-1)
    dweight = products.flatten(0, -2).sum(0).to(weight.dtype) if wanted else None
    return (dy * weight).addcmul_(normal, mean, value=-1).mul_(r), dweight


@jit
def _forward_kernel(
    x, residual, weight, total, y, r, d, eps,
    ADDS: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: the row stays in registers between the sum of squares and the product."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < d
    at = row * d + columns
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / d + eps)
    tl.store(r + row, factor)
    value *= factor
    if SCALES:
        value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    grad, grad_total, x, weight, r, dx, partial, rows, d, rows_each,
    ADDS: tl.constexpr, SCALES: tl.constexpr, WEIGHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A stretch of rows a program: dw is summed in registers and leaves as one row of `partial`."""
    first = tl.program_id(0).to(tl.int64) * rows_each
    columns = tl.arange(0, BLOCK)
    inside = columns < d
    if SCALES:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(rows_each):
        row = first + i
        here = inside & (row < rows)
        at = row * d + columns
        dy = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        factor = tl.load(r + row, mask=row < rows, other=0.0)
        normal = value * factor
        if WEIGHS:
            summed += dy * normal
        if SCALES:
            dy *= scale
        mean = tl.sum(dy * normal, 0) / d
        slope = (dy - normal * mean) * factor
        if ADDS:
            slope += tl.load(grad_total + at, mask=here, other=0.0).to(tl.float32)
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=here)
    if WEIGHS:
        tl.store(partial + tl.program_id(0) * d + columns, summed, mask=inside)


WIDEST = 8192
"""Rows up to here keep the backward kernel in registers; at 16384 it spills (`benchmarks.gate`)."""


def backward_warps(d: int) -> int:
    """Eight elements a thread, one vector load, as long as a block allows it."""
    return min(max(d // 256, 4), 32)


def launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """total (with a residual), y, r of `[..., d]` tensors, by Triton."""
    x = x.contiguous()
    d = x.shape[-1]
    total = None if residual is None else torch.empty_like(x)
    y, r = _fake(x, weight, eps)
    _forward_kernel[(x.numel() // d,)](
        x, x if residual is None else residual.contiguous(), x if weight is None else weight,
        x if total is None else total, y, r, d, eps,
        ADDS=residual is not None, SCALES=weight is not None,
        BLOCK=next_power_of_2(d), num_warps=warps(d),
    )  # fmt: skip
    return total, y, r


def launch_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor | None, r: Tensor,
    wanted: bool, programs: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """dx and dw by Triton; programs: how many, each with an equal stretch of rows."""
    x, grad = x.contiguous(), grad.contiguous()
    d = x.shape[-1]
    rows = x.numel() // d
    each = -(-rows // programs)
    programs = -(-rows // each)
    dx = torch.empty_like(x)
    weighs = wanted and weight is not None
    partial = x.new_empty((programs, d) if weighs else (1,), dtype=torch.float32)
    _backward_kernel[(programs,)](
        grad, x if grad_total is None else grad_total.contiguous(), x,
        x if weight is None else weight, r, dx, partial, rows, d, each,
        ADDS=grad_total is not None, SCALES=weight is not None, WEIGHS=weighs,
        BLOCK=next_power_of_2(d), num_warps=backward_warps(d),
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype) if weighs and weight is not None else None


def _too_wide(x: Tensor) -> str | None:
    return f"rows of {x.shape[-1]} do not stay in registers" if x.shape[-1] > 65536 else None


def _fake(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
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
    forward = _normed
    fake = _fake

    def backward(grad_y, x, weight, r, wanted):
        dx, dweight = _gradients(grad_y, x, weight, r, wanted[1])
        return dx.to(x.dtype), dweight

    def cuda_forward(x, weight, eps):
        return launch_forward(x, None, weight, eps)[1:]

    def cuda_backward(grad_y, x, weight, r, wanted):
        if x.shape[-1] > WIDEST:
            dx, dweight = _gradients(grad_y, x, weight, r, wanted[1])
            return dx.to(x.dtype), dweight
        many = 2 * processors(x.get_device())
        return launch_backward(grad_y, None, x, weight, r, wanted[1], many)

    def legal(x, **_):
        return _too_wide(x)


def _sum_first(normed):
    """The spelling of a norm, after a sum that is also needed."""
    import inspect

    def pattern(x, residual, weight, eps):
        total = x + residual
        return total, normed(total, weight, eps)

    assert tuple(inspect.signature(normed).parameters) == ("x", "weight", "eps")
    return pattern


@fusion
class add_rms_norm:
    """total = x + residual; y = total / rms(total) * weight."""

    inputs = {"x": T("... d"), "residual": T("... d"), "weight": T("d"), "eps": EPS}
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
        return total, *_normed(total, weight, eps)

    def fake(x, residual, weight, eps):
        total = x.new_empty(x.shape)
        return total, *_fake(total, weight, eps)

    def backward(grad_total, grad_y, total, weight, r, wanted):
        dx, dweight = _gradients(grad_y, total, weight, r, wanted[2])
        if grad_total is not None:
            dx = dx.add_(grad_total)
        return dx.to(total.dtype), dweight

    def cuda_forward(x, residual, weight, eps):
        return launch_forward(x, residual, weight, eps)

    def cuda_backward(grad_total, grad_y, total, weight, r, wanted):
        if total.shape[-1] > WIDEST:
            dx, dweight = _gradients(grad_y, total, weight, r, wanted[2])
            dx = dx if grad_total is None else dx.add_(grad_total)
            return dx.to(total.dtype), dweight
        many = 2 * processors(total.get_device())
        return launch_backward(grad_y, grad_total, total, weight, r, wanted[2], many)

    def legal(x, residual, **_):
        if x.dtype != residual.dtype:
            return "what is added have different dtypes"
        return _too_wide(x)
