"""The Triton kernels behind gated activations and GELU with a bias, and their launches.

    gated       y = act(gate) · up          dgate = dy · up · act'(gate)       dup = dy · act(gate)
    bias        y = gelu(x + bias)          dx = dy · gelu'(x + bias)          dbias = Σ dx

Each direction is one kernel that reads and writes every element once: bytes per element at 16 bits
6 and 10 gated, 4 and 6 with a bias. Rows need not be adjacent, such as those of the halves of one
projection; results are contiguous. The gradient of the bias is summed in registers over a range of
rows and written as one row of a small tensor, which is then summed: no atomics, so the result is
bitwise deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.kernels.jit import jit, next_power_of_2, processors, tl

BLOCK = 1024
"""Elements of a row per program: eight per thread, one vector load at 16 bits."""
ROWS = 4
"""Rows whose loads are in flight together, where rows share a bias."""


@jit
def activation(x, ACT: tl.constexpr):
    """act(x) = x · share, and act'(x)."""
    if ACT == "silu":
        share = tl.sigmoid(x)
        slope = share * (1.0 + x * (1.0 - share))
    elif ACT == "gelu":
        share = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
        slope = share + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    else:  # tanh form: ½ (1 + tanh u) = sigmoid(2u), with no cancellation for small shares
        square = x * x
        twice = 1.5957691216057308 * x * (1.0 + 0.044715 * square)
        share, rest = tl.sigmoid(twice), tl.sigmoid(-twice)  # nor where the rest is small
        slope = share + x * share * rest * (1.5957691216057308 * (1.0 + 0.134145 * square))
    return x * share, slope


@jit
def gated_kernel(
    gate, up, y, gate_step, up_step, d, blocks, ACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of one row per program. *_step: elements from row to row; blocks: of a row."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d
    value = tl.load(gate + row * gate_step + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_step + columns, mask=inside, other=0.0).to(tl.float32)
    value, _ = activation(value, ACT)
    tl.store(y + row * d + columns, (value * factor).to(y.dtype.element_ty), mask=inside)


@jit
def gated_backward_kernel(
    grad, gate, up, dgate, dup, grad_step, gate_step, up_step, d, blocks,
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row per program."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d
    dy = tl.load(grad + row * grad_step + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate + row * gate_step + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_step + columns, mask=inside, other=0.0).to(tl.float32)
    value, slope = activation(value, ACT)
    at = row * d + columns
    tl.store(dgate + at, (dy * factor * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (dy * value).to(dup.dtype.element_ty), mask=inside)


@jit
def bias_kernel(
    x, bias, y, x_step, rows, d, blocks,
    ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a few rows per program."""
    program = tl.program_id(0)
    first = (program // blocks).to(tl.int64) * ROWS
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(ROWS):
        row = first + i
        here = inside & (row < rows)
        value = tl.load(x + row * x_step + columns, mask=here, other=0.0).to(tl.float32)
        value, _ = activation(value + shift, ACT)
        tl.store(y + row * d + columns, value.to(y.dtype.element_ty), mask=here)


@jit
def bias_backward_kernel(
    grad, x, bias, dx, partial, grad_step, x_step, rows, d, blocks, rows_each,
    ACT: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a range of rows per program. SUMS: its sum is written as part of a row."""
    program = tl.program_id(0)
    stretch = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if SUMS:
        summed = tl.zeros([BLOCK], dtype=tl.float32)
    first = stretch * rows_each
    last = tl.minimum(first + rows_each, rows)
    while first < last:
        for i in tl.static_range(ROWS):
            row = first + i
            here = inside & (row < last)
            dy = tl.load(grad + row * grad_step + columns, mask=here, other=0.0).to(tl.float32)
            value = tl.load(x + row * x_step + columns, mask=here, other=0.0).to(tl.float32)
            _, slope = activation(value + shift, ACT)
            slope = tl.where(here, dy * slope, 0.0)  # an infinite bias is not summed past the end
            if SUMS:
                summed += slope
            tl.store(dx + row * d + columns, slope.to(dx.dtype.element_ty), mask=here)
        first += ROWS
    if SUMS:
        tl.store(partial + stretch * d + columns, summed, mask=inside)


def launch_gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) · up of tensors [...] of one dtype, contiguous.

    act: "silu", "gelu" (exact) or "gelu_tanh".
    """
    y = gate.new_empty(gate.shape)
    if not y.numel():
        return y
    (gate, up), rows, d = _laid_out(gate, up)
    block, many, blocks = _blocks(d)
    gated_kernel[(rows * blocks,)](
        gate, up, y, gate.stride(0), up.stride(0), d, blocks,
        ACT=act, BLOCK=block, num_warps=many,
    )  # fmt: skip
    return y


def launch_gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, contiguous."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if not dgate.numel():
        return dgate, dup
    (grad, gate, up), rows, d = _laid_out(grad, gate, up)
    block, many, blocks = _blocks(d)
    gated_backward_kernel[(rows * blocks,)](
        grad, gate, up, dgate, dup, grad.stride(0), gate.stride(0), up.stride(0), d, blocks,
        ACT=act, BLOCK=block, num_warps=many,
    )  # fmt: skip
    return dgate, dup


def launch_bias(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """act(x + bias) of x [..., d] and bias [d] of one dtype, contiguous."""
    y = x.new_empty(x.shape)
    if not y.numel():
        return y
    x = _rows(x)
    rows, d = x.shape
    block, many, blocks = _blocks(d)
    bias_kernel[(-(-rows // ROWS) * blocks,)](
        x, bias.contiguous(), y, x.stride(0), rows, d, blocks,
        ACT=act, ROWS=ROWS, BLOCK=block, num_warps=many,
    )  # fmt: skip
    return y


def launch_bias_backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor,
    act: str,
    *,
    wanted: bool = True,
    programs: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, contiguous, and of bias if it is wanted.

    programs: how many; four per multiprocessor if not given.
    """
    dx = x.new_empty(x.shape)
    if not dx.numel():
        return dx, torch.zeros_like(bias) if wanted else None
    grad, x = _rows(grad), _rows(x)
    rows, d = x.shape
    block, many, blocks = _blocks(d)
    stretches = max((programs or 4 * processors(x.get_device())) // blocks, 1)
    each = -(-rows // stretches)
    stretches = -(-rows // each)
    partial = x.new_empty((stretches, d) if wanted else (1,), dtype=torch.float32)
    bias_backward_kernel[(stretches * blocks,)](
        grad, x, bias.contiguous(), dx, partial, grad.stride(0), x.stride(0), rows, d, blocks, each,
        ACT=act, SUMS=wanted, ROWS=ROWS, BLOCK=block, num_warps=many,
    )  # fmt: skip
    return dx, partial.sum(0).to(bias.dtype) if wanted else None


def _rows(value: Tensor) -> Tensor:
    """As [rows, d] with contiguous columns; a copy only where leading dims do not have a single
    stride."""
    result = value.reshape(-1, value.shape[-1] if value.dim() else 1)
    return result if result.stride(1) == 1 else result.contiguous()


def _laid_out(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """Tensors of one shape as rows, their count and width; one long row if contiguous."""
    results = [_rows(t) for t in tensors]
    rows, d = results[0].shape
    if all(t.stride(0) == d for t in results):
        return results, 1, rows * d
    return results, rows, d


def _blocks(d: int) -> tuple[int, int, int]:
    """Elements per block, its warps, and the number of blocks per row."""
    block = min(next_power_of_2(d), BLOCK)
    return block, max(block // 256, 1), -(-d // block)
