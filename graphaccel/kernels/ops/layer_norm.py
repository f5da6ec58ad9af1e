"""Fused layer normalisation, alone and after a residual add.

    r = 1 / sqrt(var(x) + eps)      n = (x − mean(x)) · r      y = n · w + b

    dx = r · (g − n · mean(g · n) − mean(g))  with g = dy · w      dw = Σ dy · n      db = Σ dy

Ba, Kiros and Hinton, Layer Normalization, 2016, §3. Computed in float32 for 16-bit inputs. Bytes
per element at 16 bits: forward 4, backward 6, as torch's own kernels, whose backward reaches 37 %
of a copy's bandwidth (Liger Kernel's measurements on an H100); with the residual 8 and 8 against 10
and 10. Saved for the backward: the sum, and two numbers per row.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.ops.row_norm import WIDEST_FORWARD, launch_backward, launch_forward, widest

aten = torch.ops.aten
EPS = Scalar(1e-5, (1e-12,))


@overload
def wide(x: Tensor) -> Tensor: ...
@overload
def wide(x: Tensor | None) -> Tensor | None: ...
def wide(x: Tensor | None) -> Tensor | None:
    """In the dtype of the computation: float32 for 16 bits."""
    return x.float() if x is not None and x.dtype in (torch.bfloat16, torch.float16) else x


def normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y in the wider dtype of x and weight, mean and r in that of the computation: by torch's own
    kernel."""
    y, mean, r = torch.native_layer_norm(wide(x), x.shape[-1:], wide(weight), wide(bias), eps)
    return y.to(given_kind(x.dtype, weight)), mean, r


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    r: Tensor,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx in the dtype of the computation, dweight and dbias in their own, None if not wanted; all
    contiguous, as the kernels return them: torch's fake predicts the strides of a transposed
    gradient."""
    mask = [True, wanted[0] and weight is not None, wanted[1] and bias is not None]
    dx, dweight, dbias = aten.native_layer_norm_backward(
        wide(grad.contiguous()),
        wide(x.contiguous()),
        x.shape[-1:],
        mean,
        r,
        wide(weight),
        wide(bias),
        mask,
    )
    return (
        dx,
        dweight.to(weight.dtype) if mask[1] and weight is not None else None,
        dbias.to(bias.dtype) if mask[2] and bias is not None else None,
    )


def fake_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of `normed`."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = (*x.shape[:-1], 1)
    y = x.new_empty(x.shape, dtype=given_kind(x.dtype, weight))
    return y, x.new_empty(rows, dtype=kind), x.new_empty(rows, dtype=kind)


def given_kind(kind: torch.dtype, weight: Tensor | None) -> torch.dtype:
    """The dtype of y, for x of dtype `kind`: weights that autocast leaves in float32 widen it."""
    return kind if weight is None else torch.promote_types(kind, weight.dtype)


def too_wide(x: Tensor) -> str | None:
    """Why the kernels do not support rows of this width, or None."""
    if x.shape[-1] > WIDEST_FORWARD:
        return f"rows of {x.shape[-1]} do not stay in registers"
    return None


def of_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`nn.LayerNorm`."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def spelled_out(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """As in the original BERT."""
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps)) + bias


@fusion
class layer_norm:
    """y = (x - mean) / std * weight + bias over the last dim."""

    inputs = {
        "x": T("... d"),
        "weight": T("d", optional=True),
        "bias": T("d", optional=True),
        "eps": EPS,
    }
    outputs = {"y": T("... d")}
    saved = {"mean": T("... 1", dtype="wide"), "r": T("... 1", dtype="wide")}
    whole = ("d",)
    devices = ("cuda",)  # on a CPU it is torch's own kernel
    patterns = (
        of_torch,
        spelled_out,
        lambda x, weight, eps: F.layer_norm(x, x.shape[-1:], weight, None, eps),
        lambda x, eps: F.layer_norm(x, x.shape[-1:], None, None, eps),
    )
    negatives = (
        lambda x, weight, bias, eps: F.layer_norm(
            x, x.shape[-2:], weight.expand(x.shape[-2:]), bias.expand(x.shape[-2:]), eps
        ),
        lambda x, weight, bias, eps: F.rms_norm(x, x.shape[-1:], weight, eps) + bias,
        lambda x, weight, bias, eps: (
            weight * ((x - x.mean(-1, keepdim=True)) / torch.sqrt(x.pow(2).mean(-1, True) + eps))
            + bias
        ),
    )
    forward = normed
    fake = fake_norm

    def backward(grad_y, x, weight, bias, mean, r, wanted):
        dx, dweight, dbias = gradients(grad_y, x, weight, bias, mean, r, (wanted[1], wanted[2]))
        return dx.to(x.dtype), dweight, dbias

    def cuda_forward(x, weight, bias, eps):
        out = given_kind(x.dtype, weight)
        built = launch_forward(x, weight, bias, eps, centres=True, out=out)
        return built.y, built.mean, built.r

    def cuda_backward(grad_y, x, weight, bias, mean, r, wanted):
        some = (wanted[1], wanted[2])
        if x.shape[-1] > widest(True):
            dx, dweight, dbias = gradients(grad_y, x, weight, bias, mean, r, some)
            return dx.to(x.dtype), dweight, dbias
        built = launch_backward(grad_y, x, weight, bias, mean, r, wanted=some)
        return built.dx, built.dweight, built.dbias

    def legal(x, weight, bias, **_):
        if not _fits(x.dtype, weight, bias):
            return "x, weight and bias have different dtypes"
        return too_wide(x)


def sum_first(norm):
    """The pattern of a norm after an add whose sum may also be needed elsewhere."""

    def pattern(x, residual, weight, bias, eps):
        total = x + residual
        return total, norm(total, weight, bias, eps)

    return pattern


@fusion
class add_layer_norm:
    """total = x + residual; y = layer norm of total."""

    inputs = {
        "x": T("... d"),
        "residual": T("... d", broadcast=True),
        "weight": T("d"),
        "bias": T("d"),
        "eps": EPS,
    }
    outputs = {"total": T("... d", optional=True), "y": T("... d")}
    saved = {"mean": T("... 1", dtype="wide"), "r": T("... 1", dtype="wide")}
    gradients = {"residual": "x"}
    whole = ("d",)
    devices = ("cuda",)
    patterns = (sum_first(of_torch), sum_first(spelled_out))
    negatives = (
        lambda x, residual, weight, bias, eps: (
            x - residual,
            of_torch(x - residual, weight, bias, eps),
        ),
        lambda x, residual, weight, bias, eps: (
            x + residual,
            of_torch(x, weight, bias, eps) + residual,
        ),
    )

    def forward(x, residual, weight, bias, eps):
        total = (x + residual).contiguous()
        return total, *normed(total, weight, bias, eps)

    def fake(x, residual, weight, bias, eps):
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        return total, *fake_norm(total, weight, bias, eps)

    def backward(grad_total, grad_y, total, weight, bias, mean, r, wanted):
        some = (wanted[2], wanted[3])
        dx, dweight, dbias = gradients(grad_y, total, weight, bias, mean, r, some)
        dx = dx if grad_total is None else dx.add_(grad_total)
        return dx.to(total.dtype), dweight, dbias

    def cuda_forward(x, residual, weight, bias, eps):
        out = given_kind(torch.promote_types(x.dtype, residual.dtype), weight)
        built = launch_forward(x, weight, bias, eps, centres=True, out=out, residual=residual)
        return built.total, built.y, built.mean, built.r

    def cuda_backward(grad_total, grad_y, total, weight, bias, mean, r, wanted):
        some = (wanted[2], wanted[3])
        if total.shape[-1] > widest(True):
            dx, dweight, dbias = gradients(grad_y, total, weight, bias, mean, r, some)
            dx = dx if grad_total is None else dx.add_(grad_total)
            return dx.to(total.dtype), dweight, dbias
        built = launch_backward(
            grad_y, total, weight, bias, mean, r, grad_total=grad_total, wanted=some
        )
        return built.dx, built.dweight, built.dbias

    def legal(x, residual, weight, bias, **_):
        return added(x, residual) or kinds(x, residual, weight, bias) or too_wide(x)


def added(x: Tensor, residual: Tensor) -> str | None:
    """Why a sum does not have the shape of its first term, or None."""
    if torch.broadcast_shapes(x.shape, residual.shape) != x.shape:
        return "what is added is larger than x"
    return None


def kinds(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the dtypes of a sum and of the weights are not supported, or None."""
    if not _fits(torch.promote_types(x.dtype, residual.dtype), weight, bias):
        return "the sum, weight and bias have different dtypes"
    return None


def _fits(kind: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether weight and bias have x's dtype, or both float32 where x has 16 bits."""
    given = {t.dtype for t in (weight, bias) if t is not None}
    return given <= {kind} or (given == {torch.float32} and kind != torch.float64)
