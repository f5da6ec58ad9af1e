"""Fused scale, mask, softmax and dropout, where attention itself is not torch's SDPA.

    w = softmax(x · scale + mask)                                     y = w · kept / (1 − p)
    dx = scale · w · (dw − Σ w · dw), dw = dy · kept / (1 − p)  =  scale · (y · dy − w · Σ y · dy)

Saved for the backward: w and y, and neither mask nor seed. The dropout mask enters dx only as w ·
kept / (1 − p), which is y, and y is saved anyway: by the matmul with v, which reads it. That is a
byte per element less than with a mask. Bytes per element at 16 bits: 6 + 8; eager 17 + 15.

On a CPU the mask is `torch.native_dropout`'s: the same bits as eager's for the same seed. On CUDA
the kernel draws its own from a seed by torch's generator, so the random stream differs from
eager's: "auto" never places it, it has to be pinned by name. An element's random number depends on
its row and column (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011, §5.1:
Philox-4x32), four elements per call: one per call takes twice the registers.

Where nothing else reads the weights, `dropout_attention` is the larger pattern and has precedence.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.jit import jit, tl
from graphaccel.kernels.ops.softmax import (
    BACKWARD_EACH,
    FORWARD_EACH,
    WIDEST_BACKWARD,
    block,
    kept,
    placed,
    scaled,
    softmax_rows,
    spellings,
)

WIDEST_FORWARD = 16384
"""Rows up to this width stay in registers in the forward, random numbers included
(`benchmarks.gate`)."""


@jit
def forward_kernel(
    x, mask, seed, weights, y, rows, k, scale, keep,
    size_1, size_2, size_3, stride_0, stride_1, stride_2, stride_3, step,
    MASKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of k elements per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    value = softmax_rows(
        x, mask, row, columns, rows, k, scale,
        size_1, size_2, size_3, stride_0, stride_1, stride_2, stride_3, step, MASKS,
    )  # fmt: skip
    inside = (row < rows)[:, None] & (columns < k)[None, :]
    at = row.to(tl.int64)[:, None] * k + columns[None, :]
    rounded = value.to(weights.dtype.element_ty)
    tl.store(weights + at, rounded, mask=inside)
    none = tl.zeros([ROWS, BLOCK // 4], dtype=tl.uint32)
    place = none + tl.arange(0, BLOCK // 4)[None, :].to(tl.uint32)
    first, second, third, fourth = tl.philox(
        tl.load(seed), place, none + row[:, None].to(tl.uint32), none, none
    )
    drawn = tl.join(tl.join(first, second), tl.join(third, fourth))
    some = tl.uint_to_uniform_float(tl.reshape(drawn, [ROWS, BLOCK])) < keep
    # A multiplication, as in eager: NaN stays NaN where it is dropped.
    value = rounded.to(tl.float32) * tl.where(some, 1.0 / keep, 0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(
    grad, weights, y, dx, rows, k, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ROWS rows of k elements per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < k)[None, :]
    at = row.to(tl.int64)[:, None] * k + columns[None, :]
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    slope *= tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    slope -= share * tl.sum(slope, 1)[:, None]
    tl.store(dx + at, (slope * scale).to(dx.dtype.element_ty), mask=inside)


def launch_forward(
    x: Tensor, scale: float, mask: Tensor | None, p: float, weights: Tensor, y: Tensor
) -> None:
    """Write softmax(x * scale + mask) to weights and its dropout to y, by Triton.

    x, weights, y: [..., k] of bf16, fp16 or fp32, the last two contiguous. mask: broadcast to the
    shape of x, of any dtype. p: probability with which elements are dropped; the seed comes from
    torch's generator on the device, without a synchronisation.
    """
    k = x.shape[-1]
    rows = x.numel() // k
    shape = block(k, FORWARD_EACH)
    x = x.contiguous()
    seed = torch.randint(2**31 - 1, (1,), device=x.device)
    sizes, strides, step = (1, 1, 1), (0, 0, 0, 0), 0
    if mask is not None:
        mask, sizes, strides, step = placed(mask.to(x.device), x.shape)
    forward_kernel[(-(-rows // shape["ROWS"]),)](
        x, x if mask is None else mask, seed, weights, y, rows, k, scale, 1.0 - p,
        *sizes, *strides, step, MASKS=mask is not None, **shape,
    )  # fmt: skip


def launch_backward(grad: Tensor, weights: Tensor, y: Tensor, scale: float, dx: Tensor) -> None:
    """Write scale * (y * grad - weights * sum(y * grad)) to dx, contiguous, by Triton.

    All are [..., k] of bf16, fp16 or fp32.
    """
    k = y.shape[-1]
    rows = y.numel() // k
    shape = block(k, BACKWARD_EACH)
    grad, weights, y = grad.contiguous(), weights.contiguous(), y.contiguous()
    backward_kernel[(-(-rows // shape["ROWS"]),)](grad, weights, y, dx, rows, k, scale, **shape)


def _dropped(weights: Tensor, p: float) -> Tensor:
    """As captured: `nn.Dropout` in training."""
    return torch.native_dropout(weights, p, True)[0]


def _read_twice(weights: Tensor, p: float) -> Tensor:
    return weights + _dropped(weights, p)


def _by_torch(x: Tensor, mask: Tensor | None, scale: float, p: float) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(scaled(x, scale, mask), -1).to(x.dtype)
    return _dropped(weights, p), weights


def _gradient(grad: Tensor, weights: Tensor, y: Tensor, scale: float) -> Tensor:
    low = weights.dtype in (torch.bfloat16, torch.float16)
    share, slope = (weights.float(), y.float()) if low else (weights, y)
    slope = slope * grad
    slope.addcmul_(share, slope.sum(-1, keepdim=True), value=-1).mul_(scale)
    return torch.empty_like(weights).copy_(slope)


_SCORES = (
    lambda x, mask, scale: x * scale + mask,
    lambda x, mask: x + mask,
    lambda x, scale: x * scale,
    lambda x: x,
)


@fusion
class scale_mask_softmax_dropout:
    """dropout(softmax(x * scale + mask)) over the last dim."""

    inputs = {
        "x": T("... q k"),
        "mask": T("... q k", optional=True, grad=False, mask=True),
        "scale": Scalar(1.0, (0.125,)),
        "p": Scalar(0.1, (0.5,)),
    }
    outputs = {"y": T("... q k")}
    saved = {"weights": T("... q k")}
    whole = ("k",)
    random = True
    devices = ()

    def kept(y, weights):
        """A weight of 0 counts as kept: it makes no difference."""
        return (y != 0) | (weights == 0)

    tensor_parallel = False  # it would gather the heads: parts draw other random numbers
    patterns = (
        *spellings(*_SCORES, after=_dropped),
        *spellings(*_SCORES, after=_dropped, cast_last=True),
    )
    negatives = (
        lambda x, mask, scale, p: _dropped(torch.softmax(x * scale + mask, -2), p),
        lambda x, mask, scale, p: _dropped(torch.log_softmax(x * scale + mask, -1), p),
        lambda x, mask, scale, p: _dropped(torch.sigmoid(x * scale + mask), p),
        # Dropout of the scores; of another tensor; softmax read twice.
        lambda x, mask, scale, p: torch.softmax(_dropped(x * scale + mask, p), -1),
        lambda x, mask, scale, p: torch.softmax(x * scale + mask, -1) * _dropped(x, p),
        lambda x, mask, scale, p: _read_twice(torch.softmax(x * scale + mask, -1), p),
    )

    def forward(x, mask, scale, p):
        return _by_torch(x, mask, scale, p)

    def fake(x, mask, scale, p):
        weights = torch.softmax(x, -1)
        return torch.empty_like(weights), weights

    def backward(grad_y, weights, y, scale):
        return _gradient(grad_y, weights, y, scale)

    def fake_backward(grad_y, weights, y, scale):
        return torch.empty_like(weights)

    def cuda_forward(x, mask, scale, p):
        if not kept(x, WIDEST_FORWARD):
            return _by_torch(x, mask, scale, p)
        weights, y = (x.new_empty(x.shape) for _ in range(2))
        launch_forward(x, scale, mask, p, weights, y)
        return y, weights

    def cuda_backward(grad_y, weights, y, scale):
        if not kept(y, WIDEST_BACKWARD):
            return _gradient(grad_y, weights, y, scale)
        dx = torch.empty_like(weights)
        built = dx if dx.is_contiguous() else y.new_empty(y.shape)
        launch_backward(grad_y, weights, y, scale, built)
        return dx if built is dx else dx.copy_(built)

    def legal(p, **_):
        return None if 0.0 <= p < 1.0 else f"a dropout of {p} keeps nothing"
