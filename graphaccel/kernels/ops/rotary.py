"""Fused rotary position embedding (RoPE) on the two halves of a head.

    y₁ = x₁ cos₁ − x₂ sin₁        y₂ = x₂ cos₂ + x₁ sin₂              (backward: the transpose)

Su et al., RoFormer, 2021, §3.4.2, in the layout of GPT-NeoX. Only the tables are saved for the
backward. Bytes per element at 16 bits: 4 + 4; eager 20 + 28 (a concatenation of halves, then two
multiplications and an add).
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.kernels.fusion import T, fusion
from graphaccel.kernels.jit import jit, next_power_of_2, tl

TILE = 1024
"""Pairs that a program rotates: eight per thread."""
WARPS = 4


@jit
def turn_kernel(
    x, cos, sin, y, rows, inner, middle,
    x0, x1, x2, c0, c1, c2, s0, s1, s2, y0, y1, y2,
    BACK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both halves of a few rows per program; HALF is constant, so that 40 still has vector loads.

    A row is one of [outer, middle, inner], in which each tensor has its own three strides.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    at0 = (row // inner // middle).to(tl.int64)[:, None]
    at1 = (row // inner % middle).to(tl.int64)[:, None]
    at2 = (row % inner).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = there & (column < HALF)
    left = at0 * x0 + at1 * x1 + at2 * x2 + column
    a = tl.load(x + left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + left + HALF, mask=inside, other=0.0).to(tl.float32)
    left = at0 * c0 + at1 * c1 + at2 * c2 + column
    cos_a = tl.load(cos + left, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + left + HALF, mask=inside, other=0.0).to(tl.float32)
    left = at0 * s0 + at1 * s1 + at2 * s2 + column
    sin_a = tl.load(sin + left, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + left + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        u = a * cos_a + b * sin_b
        v = b * cos_b - a * sin_a
    else:
        u = a * cos_a - b * sin_a
        v = b * cos_b + a * sin_b
    left = at0 * y0 + at1 * y1 + at2 * y2 + column
    tl.store(y + left, u.to(y.dtype.element_ty), mask=inside)
    tl.store(y + left + HALF, v.to(y.dtype.element_ty), mask=inside)


def tile(half: int) -> tuple[int, int]:
    """Rows and columns of each half per program."""
    block = next_power_of_2(half)
    return max(TILE // block, 1), block


def launch(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor | None:
    """x [..., s, d] rotated, or rotated back, by Triton; strides as in `_like`.

    None where a row is not contiguous in memory, for more than four dims, or for too many rows.
    """
    if x.dim() > 4 or x.stride(-1) != 1 or x.shape.numel() >= 1 << 32:
        return None
    y = _like(x, cos)
    if y.stride(-1) != 1:
        return None
    if not x.numel():
        return y
    d = x.shape[-1]
    cos, sin = _adjacent(cos, d), _adjacent(sin, d)
    # Rows in memory order: neighbouring programs read neighbouring memory.
    order = sorted(range(x.dim() - 1), key=lambda i: -x.stride(i))
    sizes = [1, 1, 1, *(x.shape[i] for i in order)][-3:]
    steps: list[int] = []
    for t in (x, cos.expand(x.shape), sin.expand(x.shape), y):
        steps += [0, 0, 0, *(t.stride(i) for i in order)][-3:]
    rows = x.numel() // d
    many, block = tile(d // 2)
    turn_kernel[(-(-rows // many),)](
        x, cos, sin, y, rows, sizes[2], sizes[1], *steps,
        BACK=back, HALF=d // 2, ROWS=many, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return y


def _adjacent(table: Tensor, d: int) -> Tensor:
    """A table whose columns are distinct and contiguous in memory."""
    if table.shape[-1] == d and table.stride(-1) == 1:
        return table
    return table.expand(*table.shape[:-1], d).contiguous()


def _like(x: Tensor, cos: Tensor) -> Tensor:
    """An empty x * cos, with the strides of x where it is dense."""
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))


def _forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.mul(x, cos, out=_like(x, cos))
    (a, b), (u, v), (s, t) = _split(x), _split(y), _split(sin)
    u.addcmul_(b, s, value=-1)
    v.addcmul_(a, t)
    return y


def _backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dx = torch.mul(grad, cos, out=_like(grad, cos))
    (a, b), (u, v), (s, t) = _split(grad), _split(dx), _split(sin)
    u.addcmul_(b, t)
    v.addcmul_(a, s, value=-1)
    return dx


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

    forward = _forward

    def backward(grad_y, cos, sin):
        return _backward(grad_y, cos, sin)

    def cuda_forward(x, cos, sin):
        y = launch(x, cos, sin, back=False)
        return _forward(x, cos, sin) if y is None else y

    def cuda_backward(grad_y, cos, sin):
        dx = launch(grad_y, cos, sin, back=True)
        return _backward(grad_y, cos, sin) if dx is None else dx

    def fake(x, cos, sin):
        return _like(x, cos)

    def fake_backward(grad_y, cos, sin):
        return _like(grad_y, cos)

    def legal(x, cos, sin):
        if x.shape[-1] % 2:
            return f"a head of {x.shape[-1]} has no halves"
        if cos.dtype != sin.dtype or cos.dtype not in (x.dtype, torch.float32):
            return "its tables are neither in the dtype of x nor in float32"
        if torch.broadcast_shapes(x.shape, cos.shape, sin.shape) != x.shape:
            return "its tables are larger than x"
        return None
