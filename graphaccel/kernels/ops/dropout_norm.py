"""Dropout, residual add and norm as one op, for layer and RMS norms.

    total = residual + dropout(x)         y = norm(total)

    dtotal = dnorm(dy) + dtotal from elsewhere        dx = dtotal · kept / (1 − p)

Saved for the backward: the sum, the mask at one byte per element, one or two numbers per row. Bytes
per element at 16 bits: forward 9, backward 11; eager moves 15 and 17 with a layer norm.

On a CPU the mask is `torch.native_dropout`'s: the same bits as eager's for the same seed. On CUDA
the kernel draws its own from a seed by torch's generator, so the random stream differs from
eager's: "auto" never places it, it has to be pinned by name.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.ops import layer_norm as layer
from graphaccel.kernels.ops import rms_norm as rms
from graphaccel.kernels.ops.row_norm import launch_backward, launch_forward, widest

P = Scalar(0.1, (0.5,))


def _dropped(x: Tensor, p: float) -> Tensor:
    """As captured: `nn.Dropout` in training."""
    return torch.native_dropout(x, p, True)[0]


def _mask(mask: Tensor, **_: Tensor) -> Tensor:
    return mask


def _undropped(dx: Tensor, mask: Tensor, p: float) -> Tensor:
    """dx · kept / (1 − p), in the dtype of dx."""
    return torch.ops.aten.native_dropout_backward(dx, mask, 1.0 / (1.0 - p))


def _sum(x: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    built, mask = torch.native_dropout(x, p, True)
    return (built + residual).contiguous(), mask.contiguous()


def _fake_sum(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=kind), x.new_empty(x.shape, dtype=torch.bool)


def _legal(x: Tensor, residual: Tensor, p: float) -> str | None:
    if x.shape != residual.shape:
        return "what is added has another shape than x"
    if not 0.0 <= p < 1.0:
        return f"a dropout of {p} keeps nothing"
    return layer.too_wide(x)


def _after_layer_norm(norm):
    def pattern(x, residual, weight, bias, p, eps):
        total = _dropped(x, p) + residual
        return total, norm(total, weight, bias, eps)

    return pattern


@fusion
class dropout_add_layer_norm:
    """total = dropout(x) + residual; y = layer norm of total."""

    inputs = {
        "x": T("... d"),
        "residual": T("... d"),
        "weight": T("d"),
        "bias": T("d"),
        "p": P,
        "eps": layer.EPS,
    }
    outputs = {"total": T("... d", optional=True), "y": T("... d")}
    saved = {
        "mask": T("... d", dtype="bool"),
        "mean": T("... 1", dtype="wide"),
        "r": T("... 1", dtype="wide"),
    }
    whole = ("d",)
    random = True
    kept = _mask
    devices = ()
    patterns = (_after_layer_norm(layer.of_torch), _after_layer_norm(layer.spelled_out))
    negatives = (
        lambda x, residual, weight, bias, p, eps: (
            _dropped(x + residual, p),
            layer.of_torch(_dropped(x + residual, p), weight, bias, eps),
        ),
        lambda x, residual, weight, bias, p, eps: (
            x + residual,
            _dropped(layer.of_torch(x + residual, weight, bias, eps), p),
        ),
    )

    def forward(x, residual, weight, bias, p, eps):
        total, mask = _sum(x, residual, p)
        y, mean, r = layer.normed(total, weight, bias, eps)
        return total, y, mask, mean, r

    def fake(x, residual, weight, bias, p, eps):
        total, mask = _fake_sum(x, residual)
        y, mean, r = layer.fake_norm(total, weight, bias, eps)
        return total, y, mask, mean, r

    def backward(grad_total, grad_y, total, weight, bias, mask, mean, r, p, wanted):
        some = (wanted[2], wanted[3])
        dx, dweight, dbias = layer.gradients(grad_y, total, weight, bias, mean, r, some)
        dx = dx if grad_total is None else dx.add_(grad_total)
        return _undropped(dx, mask, p).to(total.dtype), dx.to(total.dtype), dweight, dbias

    def cuda_forward(x, residual, weight, bias, p, eps):
        out = layer.given_kind(torch.promote_types(x.dtype, residual.dtype), weight)
        built = launch_forward(
            x, weight, bias, eps, centres=True, out=out, residual=residual, dropout=p
        )
        return built.total, built.y, built.mask, built.mean, built.r

    def cuda_backward(grad_total, grad_y, total, weight, bias, mask, mean, r, p, wanted):
        some = (wanted[2], wanted[3])
        if total.shape[-1] > widest(True):
            dx, dweight, dbias = layer.gradients(grad_y, total, weight, bias, mean, r, some)
            dx = dx if grad_total is None else dx.add_(grad_total)
            return _undropped(dx, mask, p).to(total.dtype), dx.to(total.dtype), dweight, dbias
        built = launch_backward(
            grad_y, total, weight, bias, mean, r, grad_total=grad_total, mask=mask, dropout=p,
            wanted=some,
        )  # fmt: skip
        return built.dropped, built.dx, built.dweight, built.dbias

    def legal(x, residual, weight, bias, p, **_):
        return _legal(x, residual, p) or layer.kinds(x, residual, weight, bias)


def _after_rms_norm(norm):
    def pattern(x, residual, weight, p, eps):
        total = _dropped(x, p) + residual
        return total, norm(total, weight, eps)

    return pattern


@fusion
class dropout_add_rms_norm:
    """total = dropout(x) + residual; y = RMS norm of total."""

    inputs = {
        "x": T("... d"),
        "residual": T("... d"),
        "weight": T("d"),
        "p": P,
        "eps": rms.EPS,
    }
    outputs = {"total": T("... d", optional=True), "y": T("... d")}
    saved = {"mask": T("... d", dtype="bool"), "r": T("... 1", dtype="wide")}
    whole = ("d",)
    random = True
    kept = _mask
    devices = ()
    patterns = tuple(_after_rms_norm(norm) for norm in rms.SPELLINGS)
    negatives = (
        lambda x, residual, weight, p, eps: (
            _dropped(x + residual, p),
            rms.SPELLINGS[0](_dropped(x + residual, p), weight, eps),
        ),
    )

    def forward(x, residual, weight, p, eps):
        total, mask = _sum(x, residual, p)
        y, r = rms.normed(total, weight, eps)
        return total, y, mask, r

    def fake(x, residual, weight, p, eps):
        total, mask = _fake_sum(x, residual)
        y, r = rms.fake_norm(total, weight, eps)
        return total, y, mask, r

    def backward(grad_total, grad_y, total, weight, mask, r, p, wanted):
        dx, dweight = rms.gradients(grad_y, total, weight, r, wanted[2])
        dx = dx if grad_total is None else dx.add_(grad_total)
        return _undropped(dx, mask, p).to(total.dtype), dx.to(total.dtype), dweight

    def cuda_forward(x, residual, weight, p, eps):
        kind = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), weight.dtype)
        built = launch_forward(
            x, weight, None, eps, centres=False, out=kind, residual=residual, dropout=p
        )
        return built.total, built.y, built.mask, built.r

    def cuda_backward(grad_total, grad_y, total, weight, mask, r, p, wanted):
        if total.shape[-1] > widest(False):
            dx, dweight = rms.gradients(grad_y, total, weight, r, wanted[2])
            dx = dx if grad_total is None else dx.add_(grad_total)
            return _undropped(dx, mask, p).to(total.dtype), dx.to(total.dtype), dweight
        built = launch_backward(
            grad_y, total, weight, None, None, r, grad_total=grad_total, mask=mask, dropout=p,
            wanted=(wanted[2], False),
        )  # fmt: skip
        return built.dropped, built.dx, built.dweight

    def legal(x, residual, p, **_):
        return _legal(x, residual, p)
