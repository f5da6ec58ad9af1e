"""Run under TRITON_INTERPRET=1: errors of the pointwise kernels against float64, as JSON."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.ops import rotary, row_pointwise
from graphaccel.kernels.ops.row_pointwise import (
    launch_bias,
    launch_bias_backward,
    launch_gated,
    launch_gated_backward,
)

GUARD = 1024  # a whole block
ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
found: dict[str, tuple[float, float]] = {}


def note(name: str, got: Tensor | None, right: Tensor, like: Tensor) -> None:
    """right: in float64. like: the dtype and strides that are due."""
    assert got is not None
    assert (got.dtype, got.shape, got.stride()) == (like.dtype, like.shape, like.stride()), name
    error = (got.double() - right).abs().max().item()  # NaN where something is missing
    unit = max(torch.finfo(got.dtype).eps, 4e-7)
    found[name] = (error, unit * right.abs().max().item())


def walled(shape: tuple[int, ...], dtype: torch.dtype, apart: int = 0) -> Tensor:
    """Random numbers in [..., d] with NaN around, and `apart` of them after each row."""
    *leading, d = shape
    count = math.prod(leading) * (d + apart)
    room = torch.full((2 * GUARD + count,), math.nan, dtype=dtype)
    rows = room[GUARD : GUARD + count].view(*leading, d + apart)[..., :d]
    return rows.copy_(torch.randn(shape, generator=generator))


@contextmanager
def guarded() -> Iterator[None]:
    """What the launchers make is NaN between walls of sevens, which must stand afterwards."""
    rooms: list[Tensor] = []
    plain = (Tensor.new_empty, torch.empty_like)

    def room(count: int, dtype: torch.dtype) -> Tensor:
        whole = torch.full((2 * GUARD + count,), 7.0, dtype=dtype)
        whole[GUARD : GUARD + count] = math.nan
        rooms.append(whole)
        return whole[GUARD : GUARD + count]

    def new_empty(like: Tensor, shape: Any, dtype: Any = None, **device: Any) -> Tensor:
        if device:  # the interpreter's own
            return plain[0](like, shape, **device)
        return room(math.prod(shape), dtype or like.dtype).view(shape)

    def empty_like(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        made = plain[1](like, dtype=dtype, device="meta")
        return room(made.numel(), made.dtype).as_strided(made.shape, made.stride())

    Tensor.new_empty, torch.empty_like = new_empty, empty_like  # type: ignore[assignment]
    try:
        yield
    finally:
        Tensor.new_empty, torch.empty_like = plain
    for whole in rooms:
        assert (whole[:GUARD] == 7).all(), "written before a result"
        assert (whole[-GUARD:] == 7).all(), "written after a result"


def gradients(y: Tensor, grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, grad.double())


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


for dtype in (torch.float32, torch.float16):
    generator = torch.Generator().manual_seed(0)
    layouts = {
        "dense": [walled((2, 3, 431), dtype) for _ in range(3)],
        "apart": [walled((2, 3, 35), dtype, apart=n) for n in (35, 2, 0)],
        "wide rows": [walled((3, 1027), dtype, apart=n) for n in (1, 0, 5)],
        "transposed": [
            walled((3, 2, 33), dtype).transpose(0, 1),
            walled((2, 3, 33), dtype),
            walled((2, 33, 3), dtype).transpose(1, 2),
        ],
    }
    for layout, (gate, up, grad) in layouts.items():
        for act, function in ACTS.items():
            gate64, up64 = wide(gate, up)
            y = function(gate64) * up64
            dgate, dup = gradients(y, grad, gate64, up64)
            name, like = f"{act} {layout} {dtype}", torch.empty(gate.shape, dtype=dtype)
            with guarded():
                note(f"{name} y", launch_gated(gate, up, act), y.detach(), like)
                got = launch_gated_backward(grad, gate, up, act)
            note(f"{name} dgate", got[0], dgate, like)
            note(f"{name} dup", got[1], dup, like)
    for (layout, (x, other, grad)), act in product(layouts.items(), ("gelu", "gelu_tanh")):
        bias = other.flatten(0, -2)[0]
        x64, bias64 = wide(x, bias)
        y = ACTS[act](x64 + bias64)
        dx, dbias = gradients(y, grad, x64, bias64)
        name, like = f"bias_{act} {layout} {dtype}", torch.empty(x.shape, dtype=dtype)
        with guarded():
            note(f"{name} y", launch_bias(x, bias, act), y.detach(), like)
            for programs in (1, 4):
                got = launch_bias_backward(grad, x, bias, act, programs=programs)
                note(f"{name} dx {programs}", got[0], dx, like)
                note(f"{name} dbias {programs}", got[1], dbias, like.new_empty(bias.shape))
            got = launch_bias_backward(grad, x, bias, act, wanted=False, programs=2)
        assert got[1] is None
        note(f"{name} dx alone", got[0], dx, like)

    # b = 2, h = 3, s = 5, and heads that are no power of two: 6 and 40.
    forms = {
        "dense": (walled((2, 3, 5, 40), dtype), (1, 1, 5, 40)),
        "swapped": (walled((2, 5, 3, 40), dtype).transpose(1, 2), (5, 40)),
        "part": (walled((2, 5, 3, 6), dtype, apart=5).transpose(1, 2), (2, 1, 5, 6)),
        "three dims": (walled((7, 5, 6), dtype), (1, 5, 6)),
        "two dims": (walled((35, 40), dtype), (35, 40)),
        "expanded": (walled((2, 1, 5, 6), dtype).expand(2, 3, 5, 6), (2, 1, 5, 1)),
    }
    for form, (x, table) in forms.items():
        for kind in {dtype, torch.float32}:
            cos, sin = walled(table, kind), walled(table, kind, apart=3)
            x64, cos64, sin64 = wide(x, cos, sin)
            sin64 = sin64.expand(*sin.shape[:-1], x.shape[-1])
            y = rotary.rotary.patterns[0](x64, cos64, sin64)
            like = torch.empty_like(x, dtype=torch.promote_types(dtype, kind))
            grad = torch.empty_like(like).copy_(torch.randn(x.shape, generator=generator))
            (dx,) = gradients(y, grad, x64)
            name = f"rotary {form} {dtype} by {kind}"
            with guarded():
                note(f"{name} y", rotary.launch(x, cos, sin, False), y.detach(), like)
                note(f"{name} dx", rotary.launch(grad, cos, sin, True), dx, like)
    x = walled((2, 3, 40, 5), dtype).transpose(2, 3)
    assert rotary.launch(x, cos, sin, False) is None  # left to the reference
assert row_pointwise.launch_gated(torch.ones(0, 4), torch.ones(0, 4), "silu").shape == (0, 4)
print(json.dumps(found))
