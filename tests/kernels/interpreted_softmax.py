"""Run under TRITON_INTERPRET=1: errors of the softmax kernels against float64, as JSON."""

import json
import math

import torch
from torch import Tensor

from graphaccel.kernels.ops import softmax
from graphaccel.kernels.ops.softmax import launch_backward, launch_forward, scale_mask_softmax

GUARD = 64
run, run_back = scale_mask_softmax.cuda_forward, scale_mask_softmax.cuda_backward
assert run is not None
assert run_back is not None
found: dict[str, tuple[float, float]] = {}


def note(name: str, got: Tensor, right: Tensor, like: Tensor) -> None:
    """Half a unit in the last place of the range, and what float32 rounds of scores of a hundred;
    NaN where NaN is."""
    assert got.dtype == like.dtype, name
    assert got.shape == right.shape, name
    assert got.is_contiguous(), name
    found[f"{name} nan"] = ((got.isnan() != right.isnan()).sum().item(), 0)
    right = right.nan_to_num()
    error = (got.double().nan_to_num() - right).abs().max().item()
    rounding = torch.finfo(like.dtype).eps / 2 if like.dtype == torch.float16 else 0.0
    found[name] = (error, (rounding + 1e-5) * right.abs().max().item())


def gradient(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    grad, y = grad.double(), y.double()
    return scale * y * (grad - (grad * y).sum(-1, keepdim=True))


def padded(value: Tensor) -> Tensor:
    """The same, contiguous, with NaN on both sides of its memory."""
    room = value.new_full((value.numel() + 2 * GUARD,), math.nan)
    room[GUARD:-GUARD] = value.reshape(-1)
    return room[GUARD:-GUARD].view(value.shape)


def kept(value: Tensor) -> float:
    """How many elements beside it were written to."""
    room = value.new_empty(0).set_(value.untyped_storage())
    return sum((~side.isnan()).sum().item() for side in (room[:GUARD], room[-GUARD:]))


def masks(q: int, k: int, generator: torch.Generator) -> dict[str, Tensor | None]:
    """By name, of scores [2, 3, q, k]; most hide some keys, "hidden" some rows throughout."""

    def some(*shape: int) -> Tensor:
        value = torch.randn(shape, generator=generator)
        return value.masked_fill(torch.rand(shape, generator=generator) < 0.2, -math.inf)

    hidden = some(2, 1, q, k)
    hidden[:, :, 1] = -math.inf
    return {
        "none": None,
        "full": some(2, 3, q, k),
        "hidden": hidden,
        "heads": some(3, q, k),
        "batch": some(2, 1, 1, k),
        "rows": torch.randn((q, 1), generator=generator),
        "one": torch.randn((2, 1, q, 1), generator=generator).bfloat16(),
        "keys": some(k).half(),
        "transposed": some(2, 1, k, q).transpose(-1, -2),
        "swapped": some(3, 2, q, k).transpose(0, 1),
        "bool": torch.rand((q, k), generator=generator) < 0.5,
        "number": torch.tensor(0.25),
    }


for dtype in (torch.float32, torch.float16):
    generator = torch.Generator().manual_seed(0)
    for q, k in ((7, 33), (5, 300), (2, 2049), (11, 1)):
        shape = (2, 3, q, k)
        for scale, (form, mask) in zip(
            (0.125, 1.0, 0.125, -2.0) * 3, masks(q, k, generator).items(), strict=True
        ):
            name = f"{form} {dtype} {k}"
            x, grad = (20 * torch.randn(2, *shape, generator=generator)).to(dtype)
            y = run(x, mask, scale)
            added = 0.0 if mask is None else mask.double()
            note(f"{name} y", y, torch.softmax(x.double() * scale + added, -1), x)
            dx = run_back(grad, y, scale)
            note(f"{name} dx", dx, gradient(grad, y, scale), x)

    # Memory beside the tensors: NaN that was read would show, and so would what was written.
    for shape in ((42, 33), (3, 600), (2, 2049)):
        name = f"padded {dtype} {shape[-1]}"
        x, mask, grad = (padded(torch.randn(shape, generator=generator).to(dtype)) for _ in "xmg")
        y, dx = (padded(torch.zeros(shape, dtype=dtype)) for _ in "yd")
        launch_forward(x, 0.5, mask, y)
        note(f"{name} y", y, torch.softmax(x.double() * 0.5 + mask.double(), -1), x)
        launch_backward(grad, y, 0.5, dx)
        note(f"{name} dx", dx, gradient(grad, y, 0.5), x)
        found[f"{name} beside"] = (kept(y) + kept(dx), 0)

    # Infinities and NaN among the scores.
    x = torch.randn((6, 40), generator=generator).to(dtype)
    x[0, 3], x[1, 4], x[2, 5], x[3], x[4, :39] = math.inf, -math.inf, math.nan, -math.inf, -math.inf
    for scale in (1.0, -1.0):
        got = run(x, None, scale)
        note(f"infinite {dtype} {scale}", got, torch.softmax(x.double() * scale, -1), x)

    # Other strides, and more dims of a mask than the kernel has strides for.
    x, grad = torch.randn(2, 2, 3, 9, 5, generator=generator).to(dtype).transpose(-1, -2)
    mask = torch.randn((3, 1, 9), generator=generator)
    y = run(x, mask, 0.5)
    note(f"strided {dtype} y", y, torch.softmax(x.double() * 0.5 + mask.double(), -1), x)
    dx = run_back(grad, y, 0.5)
    note(f"strided {dtype} dx", dx, gradient(grad, y, 0.5), x)
    y = y.transpose(-1, -2).contiguous().transpose(-1, -2)  # the same numbers, as x lies
    dx = run_back(grad, y, 0.5)
    assert dx.stride() == torch.empty_like(y).stride()
    note(f"as y lies {dtype} dx", dx.contiguous(), gradient(grad, y, 0.5), x)
    x = torch.randn((2, 2, 2, 2, 2, 2, 9), generator=generator).to(dtype)
    mask = torch.randn((2, 1, 2, 1, 2, 1, 9), generator=generator)
    y = run(x, mask, 0.5)
    note(f"many dims {dtype}", y, torch.softmax(x.double() * 0.5 + mask.double(), -1), x)
    mask = torch.randn((2, 1, 2, 1, 9), generator=generator)
    y = run(x, mask, 0.5)
    note(f"four dims {dtype}", y, torch.softmax(x.double() * 0.5 + mask.double(), -1), x)

    # Rows that do not stay in registers, and no rows.
    x = torch.randn((2, softmax.WIDEST_FORWARD + 1), generator=generator).to(dtype)
    y = run(x, x[:1], 0.5)
    note(f"wide {dtype} y", y, torch.softmax(x.double() * 0.5 + x[:1].double(), -1), x)
    dx = run_back(x, y, 0.5)
    note(f"wide {dtype} dx", dx, gradient(x, y, 0.5), x)
    for shape in ((0, 5), (5, 0)):
        empty = run(torch.empty(shape, dtype=dtype), None, 0.5)
        assert empty.shape == shape
        assert empty.dtype == dtype
        assert run_back(empty, empty, 0.5).shape == shape
print(json.dumps(found))
