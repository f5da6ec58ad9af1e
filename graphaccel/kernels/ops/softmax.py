"""Fused scale, mask and softmax of attention scores, where attention itself is not torch's SDPA.

    y = softmax(x · scale + mask)            dx = scale · y · (dy − Σ dy · y)

Computed in float32 for 16-bit inputs. Saved for the backward: y. Bytes per element at 16 bits: 4 +
6; eager 28 + 28 with an upcast. The mask is read in place, by its strides, never expanded. A
program of a kernel processes entire rows, several where they are short, and keeps them in
registers: no row is read twice. Where nothing else reads the scores, the pattern of whole attention
is replaced by `scaled_dot_product_attention`, which never writes them.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.jit import jit, next_power_of_2, tl
from graphaccel.kernels.spec import Function

aten = torch.ops.aten

WIDEST_FORWARD = 32768
"""Rows up to this width stay in registers in the forward (`benchmarks.gate`); wider ones spill."""
WIDEST_BACKWARD = 16384
"""The same for the backward, which holds two of them."""

FORWARD_EACH, BACKWARD_EACH = 16, 8
"""Elements per thread where a block allows it: all 64 warps of a multiprocessor fit."""
_MOST_ROWS = 2**31 - 2**16  # row numbers are 32-bit


@jit
def softmax_rows(
    x, mask, row, columns, rows, k, scale,
    size_1, size_2, size_3, stride_0, stride_1, stride_2, stride_3, step, MASKS: tl.constexpr,
):  # fmt: skip
    """softmax(x * scale + mask) of some rows, in float32; columns from k on are 0.

    row, columns: their indices. size, stride: of the mask's leading dims, the last one the fastest;
    step: from one element of its row to the next. Strides are 0 where it is broadcast.
    """
    known = (columns < k)[None, :]
    inside = (row < rows)[:, None] & known
    at = row.to(tl.int64)[:, None] * k + columns[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    if MASKS:
        i_3, rest = row % size_3, row // size_3
        i_2, rest = rest % size_2, rest // size_2
        i_1, i_0 = rest % size_1, rest // size_1
        start = i_0.to(tl.int64) * stride_0 + i_1.to(tl.int64) * stride_1
        start += i_2.to(tl.int64) * stride_2 + i_3.to(tl.int64) * stride_3
        there = start[:, None] + (columns * step)[None, :]
        value += tl.load(mask + there, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(known, value, float("-inf"))
    # A row of only -inf is NaN, as -inf - -inf is; so is one with NaN or inf.
    value = tl.exp(value - tl.max(value, 1)[:, None])
    return value / tl.sum(value, 1)[:, None]


@jit
def forward_kernel(
    x, mask, y, rows, k, scale,
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
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(
    grad, y, dx, rows, k, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ROWS rows of k elements per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < k)[None, :]
    at = row.to(tl.int64)[:, None] * k + columns[None, :]
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    slope -= tl.sum(slope * share, 1)[:, None]
    tl.store(dx + at, (slope * share * scale).to(dx.dtype.element_ty), mask=inside)


def block(k: int, each: int) -> dict[str, int]:
    """The rows of k elements per program, the padded width, and its warps, at least four, with
    `each` elements per thread."""
    padded = max(next_power_of_2(k), 16)
    rows = max(4 * 32 * each // padded, 1)
    return {"ROWS": rows, "BLOCK": padded, "num_warps": min(rows * padded // (32 * each), 32)}


def launch_forward(x: Tensor, scale: float, mask: Tensor | None, y: Tensor) -> None:
    """Write softmax(x * scale + mask) to y, contiguous, by Triton.

    x, y: [..., k] of bf16, fp16 or fp32. mask: broadcast to the shape of x, of any dtype.
    """
    k = x.shape[-1]
    rows = x.numel() // k
    shape = block(k, FORWARD_EACH)
    x = x.contiguous()
    sizes, strides, step = (1, 1, 1), (0, 0, 0, 0), 0
    if mask is not None:
        mask, sizes, strides, step = placed(mask.to(x.device), x.shape)
    forward_kernel[(-(-rows // shape["ROWS"]),)](
        x, x if mask is None else mask, y, rows, k, scale, *sizes, *strides, step,
        MASKS=mask is not None, **shape,
    )  # fmt: skip


def launch_backward(grad: Tensor, y: Tensor, scale: float, dx: Tensor) -> None:
    """Write scale * y * (grad - sum(grad * y)) to dx, contiguous, by Triton.

    All are [..., k] of bf16, fp16 or fp32.
    """
    k = y.shape[-1]
    rows = y.numel() // k
    shape = block(k, BACKWARD_EACH)
    grad, y = grad.contiguous(), y.contiguous()
    backward_kernel[(-(-rows // shape["ROWS"]),)](grad, y, dx, rows, k, scale, **shape)


def placed(mask: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], int]:
    """A mask, and how a kernel locates its elements for each row of `shape`: the sizes of the last
    three of its leading dims, the strides of four, and the stride within a row."""
    if mask.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        mask = mask.float()
    if mask.dim() and mask.shape[-1] > 1 and mask.stride(-1) != 1:
        mask = mask.contiguous()
    *sizes, _ = shape
    *strides, step = mask.expand(shape).stride()
    dims: list[tuple[int, int]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if dims and stride == dims[-1][0] * dims[-1][1]:  # it continues where the previous dim ends
            dims[-1] = dims[-1][0] * size, dims[-1][1]
        elif size > 1:
            dims.append((size, stride))
    if len(dims) > 4:
        return placed(mask.expand(shape).contiguous(), shape)
    first = dims.pop() if dims else (1, 0)  # its size is not needed
    dims += [(1, 0)] * (3 - len(dims))
    inner = dims[::-1]
    return mask, tuple(n for n, _ in inner), tuple(s for _, s in (first, *inner)), step


def kept(x: Tensor, widest: int) -> bool:
    """Whether rows stay in registers, there are any, and their indices fit 32 bits."""
    return 0 < x.numel() <= x.shape[-1] * _MOST_ROWS and x.shape[-1] <= widest


def scaled(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """x * scale + mask, in float32 for 16 bits."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide * scale if mask is None else torch.add(mask.to(wide.dtype), wide, alpha=scale)


def _gradient(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    wide = grad.dtype in (torch.bfloat16, torch.float16)
    given, kept = (grad.float(), y.float()) if wide else (grad, y)
    return aten._softmax_backward_data(given, kept, -1, kept.dtype).mul_(scale).to(y.dtype)


def spellings(
    *scores: Function, after: Function | None = None, cast_last: bool = False
) -> tuple[Function, ...]:
    """Patterns of a softmax over scores, a function of inputs by name: in the scores' dtype; of
    scores cast to float32; and with softmax computed in float32.

    after: what is computed from the result, a function of it and further inputs by name. cast_last:
    the last two are cast back after that, as under autocast.
    """
    soft = (
        lambda s: torch.softmax(s, -1),
        lambda s: torch.softmax(s.float(), -1),
        lambda s: torch.softmax(s, -1, dtype=torch.float32),
    )[1 if cast_last else 0 :]
    further = () if after is None else tuple(signature(after).parameters.values())[1:]

    def pattern(score: Function, turn: Function) -> Function:
        known = {**signature(score).parameters, **{p.name: p for p in further}}

        def call(**given: Any) -> Tensor:
            kind = next(iter(given.values())).dtype
            built = turn(score(**{n: given[n] for n in signature(score).parameters}))
            built = built if cast_last else built.to(kind)
            if after is not None:
                built = after(built, **{p.name: given[p.name] for p in further})
            return built.to(kind)

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
    patterns = spellings(
        lambda x, mask, scale: x * scale + mask,
        lambda x, mask: x + mask,
        lambda x, scale: x * scale,
    )
    negatives = (
        lambda x, mask, scale: torch.softmax(x * scale + mask, -2),
        lambda x, mask, scale: torch.log_softmax(x * scale + mask, -1),
    )

    def forward(x, mask, scale):
        return torch.softmax(scaled(x, scale, mask), -1).to(x.dtype)

    def fake(x, mask, scale):
        return torch.softmax(x, -1)

    def backward(grad_y, y, scale):
        return _gradient(grad_y, y, scale)

    def fake_backward(grad_y, y, scale):
        return torch.empty_like(y)

    def cuda_forward(x, mask, scale):
        if not kept(x, WIDEST_FORWARD):
            return torch.softmax(scaled(x, scale, mask), -1).to(x.dtype)
        y = x.new_empty(x.shape)
        launch_forward(x, scale, mask, y)
        return y

    def cuda_backward(grad_y, y, scale):
        if not kept(y, WIDEST_BACKWARD):
            return _gradient(grad_y, y, scale)
        dx = torch.empty_like(y)
        built = dx if dx.is_contiguous() else y.new_empty(y.shape)
        launch_backward(grad_y, y, scale, built)
        return dx if built is dx else dx.copy_(built)
