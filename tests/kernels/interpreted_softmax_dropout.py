"""Run under TRITON_INTERPRET=1: errors of softmax with dropout against float64, as JSON."""

import json
import math

import torch
from torch import Tensor

from graphaccel.kernels.ops import softmax_dropout
from graphaccel.kernels.ops.softmax_dropout import (
    launch_backward,
    launch_forward,
    scale_mask_softmax_dropout,
)

GUARD = 64
run = scale_mask_softmax_dropout.cuda_forward
run_back = scale_mask_softmax_dropout.cuda_backward
assert run is not None
assert run_back is not None
found: dict[str, tuple[float, float]] = {}


def note(name: str, got: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    """Half a unit in the last place of the range, and what float32 rounds of scores of a hundred;
    NaN where NaN is."""
    assert got.dtype == dtype, name
    assert got.shape == right.shape, name
    assert got.is_contiguous(), name
    found[f"{name} nan"] = ((got.isnan() != right.isnan()).sum().item(), 0)
    right = right.nan_to_num()
    error = (got.double().nan_to_num() - right).abs().max().item()
    rounding = torch.finfo(dtype).eps / 2 if dtype == torch.float16 else 0.0
    found[name] = (error, (rounding + 1e-5) * right.abs().max().item())


def true_weights(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return torch.softmax(x.double() * scale + (0.0 if mask is None else mask.double()), -1)


def gradient(grad: Tensor, weights: Tensor, some: Tensor, scale: float, p: float) -> Tensor:
    """As eager computes it: by what was kept."""
    weights, slope = weights.double(), grad.double() * some / (1 - p)
    return scale * weights * (slope - (slope * weights).sum(-1, keepdim=True))


def both(name: str, x: Tensor, mask: Tensor | None, scale: float, p: float) -> None:
    """Forward and backward; what was kept is read off the result, 0 counts as dropped."""
    assert run is not None
    assert run_back is not None
    y, weights = run(x, mask, scale, p)
    note(f"{name} weights", weights, true_weights(x, mask, scale), x.dtype)
    some = y != 0
    note(f"{name} y", y, weights.double() * some / (1 - p), x.dtype)
    grad = torch.randn(x.shape, generator=generator).to(x.dtype)
    dx, right = run_back(grad, weights, y, scale), gradient(grad, weights, some, scale, p)
    assert dx.dtype == x.dtype
    # y is rounded to 16 bits once; eager rounds a product with the mask instead.
    unit = torch.finfo(x.dtype).eps if x.dtype == torch.float16 else 1e-5
    error = (dx.double() - right).nan_to_num().abs().max().item()
    found[f"{name} dx"] = (error, 2 * unit * right.nan_to_num().abs().max().item())
    found[f"{name} dx nan"] = ((dx.isnan() != right.isnan()).sum().item(), 0)


def padded(value: Tensor) -> Tensor:
    """The same, contiguous, with NaN on both sides of its memory."""
    room = value.new_full((value.numel() + 2 * GUARD,), math.nan)
    room[GUARD:-GUARD] = value.reshape(-1)
    return room[GUARD:-GUARD].view(value.shape)


def untouched(value: Tensor) -> float:
    """How many elements beside it were written to."""
    room = value.new_empty(0).set_(value.untyped_storage())
    return sum((~side.isnan()).sum().item() for side in (room[:GUARD], room[-GUARD:]))


def drawn(rows: int, k: int, p: float, seed: int) -> Tensor:
    """What a kernel keeps of rows that are even."""
    assert run is not None
    torch.manual_seed(seed)
    return run(torch.zeros((rows, k)), None, 1.0, p)[0] != 0


def excess(share: Tensor, p: float, count: int) -> tuple[float, float]:
    """How far shares of kept elements are off, and five deviations of `count` of them."""
    return (share - (1 - p)).abs().max().item(), 5 * math.sqrt(p * (1 - p) / count)


for p, rows, k in ((0.25, 96, 257), (0.5, 64, 128), (0.9, 40, 1000)):
    some = drawn(rows, k, p, 0).double()
    found[f"kept {p}"] = excess(some.mean(), p, rows * k)
    found[f"kept {p} by row"] = excess(some.mean(1), p, k)
    found[f"kept {p} by column"] = excess(some.mean(0), p, rows)
    # Neighbours are dropped apart from each other: one number serves one element.
    for form, (a, b) in {
        "row": (some[1:], some[:-1]),
        "column": (some[:, 1:], some[:, :-1]),
        "turn": (some[:, 4:], some[:, :-4]),
    }.items():
        common = (a - (1 - p)) * (b - (1 - p))
        spread = 5 * p * (1 - p) / math.sqrt(a.numel())
        found[f"kept {p} beside a {form}"] = (common.mean().abs().item(), spread)
    assert len({tuple(row) for row in some.tolist()}) == rows
    assert torch.equal(drawn(rows, k, p, 0).double(), some)
    assert not torch.equal(drawn(rows, k, p, 1).double(), some)
assert drawn(8, 33, 0.0, 0).all()

for dtype in (torch.float32, torch.float16):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(2)
    for q, k, p in ((7, 33, 0.25), (5, 300, 0.1), (2, 2049, 0.5), (11, 1, 0.25)):
        hidden = torch.randn((2, 1, q, k), generator=generator)
        hidden[:, :, 1] = -math.inf  # a row that sees nothing: NaN, dropped or not
        forms = {"none": None, "hidden": hidden, "keys": hidden[0, 0, 0].half()}
        for scale, (form, mask) in zip((0.125, 1.0, -2.0), forms.items(), strict=True):
            x = (20 * torch.randn((2, 3, q, k), generator=generator)).to(dtype)
            both(f"{form} {dtype} {k}", x, mask, scale, p)

    # Memory beside the tensors: NaN that was read would show, and so would what was written.
    for shape in ((42, 33), (3, 600), (2, 2049)):
        name = f"padded {dtype} {shape[-1]}"
        given = torch.randn(3, *shape, generator=generator).to(dtype)
        x, mask, grad = map(padded, given)
        weights, y, dx = (padded(torch.zeros(shape, dtype=dtype)) for _ in range(3))
        launch_forward(x, 0.5, mask, 0.25, weights, y)
        note(f"{name} weights", weights, true_weights(x, mask, 0.5), dtype)
        launch_backward(grad, weights, y, 0.5, dx)
        assert not (y.isnan() | dx.isnan()).any()
        found[f"{name} beside"] = (untouched(weights) + untouched(y) + untouched(dx), 0)

    # Other strides of scores, gradients and what was kept.
    x = torch.randn((2, 3, 9, 5), generator=generator).to(dtype).transpose(-1, -2)
    both(f"strided {dtype}", x, torch.randn((3, 1, 9), generator=generator), 0.5, 0.25)
    y, weights = run(x, None, 0.5, 0.25)
    turned = [v.transpose(-1, -2).contiguous().transpose(-1, -2) for v in (weights, y)]
    dx = run_back(x, *turned, 0.5)
    assert dx.stride() == torch.empty_like(turned[0]).stride()
    error = (dx - run_back(x, weights, y, 0.5)).abs().max().item()
    found[f"as weights lie {dtype}"] = (error, 0)

    # Rows that do not stay in registers, and no rows; torch rounds 1 / (1 - p) to 16 bits.
    x = torch.randn((2, softmax_dropout.WIDEST_FORWARD + 1), generator=generator).to(dtype)
    both(f"wide {dtype}", x, x[:1], 0.5, 0.5)
    for shape in ((0, 5), (5, 0)):
        empty, other = run(torch.empty(shape, dtype=dtype), None, 0.5, 0.25)
        assert empty.shape == other.shape == shape
        assert empty.dtype == other.dtype == dtype
        assert run_back(empty, empty, other, 0.5).shape == shape
print(json.dumps(found))
