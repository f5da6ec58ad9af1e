"""The two Triton kernels behind every fused norm, and their launches.

A program of the forward normalises one row, which stays in registers from its sum of squares to its
multiplication by the weight: a preceding add, dropout or lookup costs no pass of its own. A program
of the backward processes a range of rows, so that the gradients of weight and bias are summed in
registers and written as one row of a small tensor, which is then summed: no atomics, so the result
is bitwise deterministic.

    CENTRES   LayerNorm: the mean is subtracted (else RMSNorm)     BIASES   a bias after the weight
    ADDS      a residual, and MORE a second one, before the norm   DROPS    dropout of x before it
    GATHERS   x is a table, of which `ids` names the row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphaccel.kernels.jit import jit, next_power_of_2, processors, tl, warps

WIDEST_FORWARD = 16384
"""Rows up to this width stay in registers in the forward (`benchmarks.gate`); wider ones spill."""


@jit
def forward_kernel(
    x, ids, residual, more, mask, weight, bias, total, y, mean, r, seed,
    d, v, period, more_period, eps, keep,
    CENTRES: tl.constexpr, ADDS: tl.constexpr, MORE: tl.constexpr, DROPS: tl.constexpr,
    GATHERS: tl.constexpr, SCALES: tl.constexpr, BIASES: tl.constexpr, TOTALS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program. v: rows of the table; period: of the residual, which repeats; TOTALS:
    `total` is written."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < d
    at = row * d + columns
    if GATHERS:
        name = tl.load(ids + row).to(tl.int64)
        known = (name >= 0) & (name < v)  # an id out of bounds reads nothing, and gives NaN
        value = tl.load(x + name * d + columns, mask=inside & known, other=0.0).to(tl.float32)
        value = tl.where(known, value, float("nan"))
    else:
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        kept = tl.rand(tl.load(seed), at.to(tl.uint32)) < keep  # 64-bit offsets cost twice
        tl.store(mask + at, kept.to(tl.int8), mask=inside)
        value = tl.where(kept, value / keep, 0.0)
    if ADDS:
        other = (row % period) * d + columns
        value += tl.load(residual + other, mask=inside, other=0.0).to(tl.float32)
    if MORE:
        third = (row % more_period) * d + columns
        value += tl.load(more + third, mask=inside, other=0.0).to(tl.float32)
    if TOTALS:
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRES:
        middle = tl.sum(value, 0) / d
        tl.store(mean + row, middle)
        value = tl.where(inside, value - middle, 0.0)
    factor = tl.rsqrt(tl.sum(value * value, 0) / d + eps)
    tl.store(r + row, factor)
    value *= factor
    if SCALES:
        value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASES:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@jit
def backward_kernel(
    grad, grad_total, x, mask, weight, mean, r, dx, dropped, partial, partial_bias,
    rows, d, rows_each, keep,
    CENTRES: tl.constexpr, ADDS: tl.constexpr, DROPS: tl.constexpr, SCALES: tl.constexpr,
    WEIGHS: tl.constexpr, BIASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A range of rows per program. ADDS: `grad_total` comes in; DROPS: `dropped` is dx before the
    dropout; WEIGHS, BIASES: sums for weight and bias are written as a row each."""
    first = tl.program_id(0).to(tl.int64) * rows_each
    columns = tl.arange(0, BLOCK)
    inside = columns < d
    if SCALES:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if WEIGHS:
        summed = tl.zeros([BLOCK], dtype=tl.float32)
    if BIASES:
        summed_bias = tl.zeros([BLOCK], dtype=tl.float32)
    last = tl.minimum(first + rows_each, rows)
    row = first
    while row < last:
        at = row * d + columns
        dy = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(r + row)
        if CENTRES:
            normal = tl.where(inside, normal - tl.load(mean + row), 0.0)
        normal *= factor
        if WEIGHS:
            summed += dy * normal
        if BIASES:
            summed_bias += dy
        if SCALES:
            dy *= scale
        slope = dy - normal * (tl.sum(dy * normal, 0) / d)
        if CENTRES:
            slope -= tl.sum(dy, 0) / d
        slope *= factor
        if ADDS:
            slope += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, slope.to(dx.dtype.element_ty), mask=inside)
        if DROPS:
            kept = tl.load(mask + at, mask=inside, other=0) != 0
            slope = tl.where(kept, slope / keep, 0.0)
            tl.store(dropped + at, slope.to(dropped.dtype.element_ty), mask=inside)
        row += 1
    if WEIGHS:
        tl.store(partial + tl.program_id(0) * d + columns, summed, mask=inside)
    if BIASES:
        tl.store(partial_bias + tl.program_id(0) * d + columns, summed_bias, mask=inside)


@dataclass(frozen=True)
class Normed:
    """The results of a forward. total: None where nothing was added. mean: None without centring.
    mask: what dropout kept, or None."""

    total: Tensor | None
    y: Tensor
    mean: Tensor | None
    r: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Gradients:
    """The results of a backward. dropped: the gradient before the dropout, or None."""

    dx: Tensor
    dropped: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


def widest(centres: bool) -> int:
    """Rows of 16 bits up to this width keep the backward in registers (`benchmarks.gate`); wider
    ones spill."""
    return 4096 if centres else 8192


def backward_warps(d: int) -> int:
    """Eight elements per thread, one vector load, as long as a block allows it."""
    return min(max(d // 256, 4), 32)


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centres: bool,
    out: torch.dtype,
    residual: Tensor | None = None,
    more: Tensor | None = None,
    ids: Tensor | None = None,
    dropout: float | None = None,
) -> Normed:
    """Norm of [..., d] tensors by Triton.

    out: dtype of y. residual, more: added first, [..., d], leading dims may be missing or 1; the
    sum has the dtype that torch's addition gives. ids: x is a table [v, d], looked up first; one
    out of bounds gives NaN.
    dropout: probability with which elements of x are dropped; the seed comes from torch's generator
    on the device, without a synchronisation.
    """
    d = x.shape[-1]
    shape = x.shape if ids is None else (*ids.shape, d)
    x = x.contiguous()
    others = [t for t in (residual, more) if t is not None]
    totals = bool(others) or ids is not None or dropout is not None
    kind = x.dtype
    for other in others:
        kind = torch.promote_types(kind, other.dtype)
    total = x.new_empty(shape, dtype=kind) if totals else None
    y = x.new_empty(shape, dtype=out)
    mean, r = (x.new_empty((*shape[:-1], 1), dtype=torch.float32) for _ in range(2))
    mask = None if dropout is None else x.new_empty(shape, dtype=torch.bool)
    if not y.numel():
        return Normed(total, y, mean if centres else None, r, mask)
    seed = ids = ids if ids is None else ids.contiguous()
    if dropout is not None:
        seed = torch.randint(2**31 - 1, (1,), device=x.device)
    residual, period = _repeated(residual, shape)
    more, more_period = _repeated(more, shape)
    forward_kernel[(y.numel() // d,)](
        x, _or(ids, x), _or(residual, x), _or(more, x),
        x if mask is None else mask.view(torch.int8), _or(weight, x), _or(bias, x), _or(total, x),
        y, mean, r, _or(seed, x), d, x.numel() // d, period, more_period, eps,
        1.0 - (dropout or 0.0),
        CENTRES=centres, ADDS=residual is not None, MORE=more is not None,
        DROPS=dropout is not None, GATHERS=ids is not None, SCALES=weight is not None,
        BIASES=bias is not None, TOTALS=totals, BLOCK=next_power_of_2(d), num_warps=warps(d),
    )  # fmt: skip
    return Normed(total, y, mean if centres else None, r, mask)


def launch_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    r: Tensor,
    *,
    grad_total: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    wanted: tuple[bool, bool] = (True, True),
    programs: int | None = None,
) -> Gradients:
    """Gradients of a norm of x [..., d] by Triton.

    grad_total: of x from elsewhere. mask, dropout: those of the forward. wanted: gradients of
    weight and bias. programs: how many, each with an equal range of rows; two per multiprocessor if
    not given.
    """
    x, grad = x.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    before = None if mask is None else torch.empty_like(x)
    weighs = wanted[0] and weight is not None
    biases = wanted[1] and bias is not None
    if not x.numel():
        return Gradients(
            dx,
            before,
            torch.zeros_like(weight) if weighs and weight is not None else None,
            torch.zeros_like(bias) if biases and bias is not None else None,
        )
    d = x.shape[-1]
    rows = x.numel() // d
    grad_total = None if grad_total is None else grad_total.contiguous()
    programs = programs or 2 * processors(x.get_device())
    each = -(-rows // programs)
    programs = -(-rows // each)
    partial = x.new_empty((programs, d) if weighs else (1,), dtype=torch.float32)
    partial_bias = x.new_empty((programs, d) if biases else (1,), dtype=torch.float32)
    backward_kernel[(programs,)](
        grad, _or(grad_total, x), x, x if mask is None else mask.contiguous().view(torch.int8),
        _or(weight, x), _or(mean, x), r, dx, _or(before, x), partial, partial_bias,
        rows, d, each, 1.0 - dropout,
        CENTRES=mean is not None, ADDS=grad_total is not None, DROPS=mask is not None,
        SCALES=weight is not None, WEIGHS=weighs, BIASES=biases,
        BLOCK=next_power_of_2(d), num_warps=backward_warps(d),
    )  # fmt: skip
    return Gradients(
        dx,
        before,
        partial.sum(0).to(weight.dtype) if weighs and weight is not None else None,
        partial_bias.sum(0).to(bias.dtype) if biases and bias is not None else None,
    )


def _or(value: Tensor | None, instead: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not read."""
    return instead if value is None else value


def _repeated(value: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor | None, int]:
    """The tensor to add, contiguous, and the number of rows after which it repeats."""
    if value is None:
        return None, 1
    sizes = list(value.shape)
    while sizes and sizes[0] == 1:
        del sizes[0]
    whole = tuple(value.shape[-1:]) == tuple(shape[-1:])
    if not whole or tuple(sizes) != tuple(shape[len(shape) - len(sizes) :]):
        value = value.expand(shape)  # its last dim is broadcast, or one in the middle
    value = value.contiguous()
    return value, value.numel() // shape[-1]
