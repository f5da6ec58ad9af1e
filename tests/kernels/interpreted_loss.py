"""Run under TRITON_INTERPRET=1: errors of the kernels of the losses against float64, as JSON."""

import json
import math

import torch
from torch import Tensor

from graphaccel.kernels.ops import cross_entropy as ce
from graphaccel.kernels.ops import linear_cross_entropy as head
from graphaccel.kernels.register import fusion_of

IGNORED = -100
SENTINEL = 77.0
LARGE = 1000.0
found: dict[str, tuple[float, float]] = {}


def note(name: str, got: Tensor, right: Tensor, kind: torch.dtype, unit: float) -> None:
    """Errors are of finite values; where the right one is none, `got` must be the same."""
    assert got.dtype == kind, name
    assert got.shape == right.shape, name
    wide, finite = got.double(), right.isfinite()
    assert torch.equal(wide.nan_to_num(1e9)[~finite], right.nan_to_num(1e9)[~finite]), name
    scale = max(right[finite].abs().max().item(), 1.0) if finite.any() else 1.0
    error = (wide - right)[finite].abs().max().item() if finite.any() else 0.0
    found[name] = (error, max(unit, torch.finfo(kind).eps / 2) * scale)


def eager(scores: Tensor, target: Tensor, grad: float) -> tuple[Tensor, Tensor]:
    """The summed loss and its gradient times `grad`, in float64."""
    wide = scores.double().requires_grad_(True)
    loss = torch.nn.functional.cross_entropy(wide, target, reduction="sum")
    (slope,) = torch.autograd.grad(loss, wide, torch.tensor(grad, dtype=torch.float64))
    return loss.detach(), slope


def padded(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows with columns of NaN between them, which no kernel may read; and the whole."""
    n, c = scores.shape
    whole = torch.full((n + 2, c + 5), math.nan, dtype=scores.dtype)
    inner = whole[1:-1, 2:-3]
    inner.copy_(scores)
    return inner, whole


def rows(name: str, n: int, c: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(c)
    scores = (3 * torch.randn(n, c, generator=generator)).to(dtype)
    target = torch.randint(0, c, (n,), generator=generator)
    if name != "counted":
        target[1::3] = IGNORED
    if name == "large":
        scores = (scores * LARGE / 10).to(dtype)
        scores[0] += LARGE
    if name == "infinite":  # of a whole block, of all but the label, of the label
        target[0], target[2], target[3] = c - 1, 1, 0
        scores[0, : c // 2] = -math.inf
        scores[2] = -math.inf
        scores[2, 1] = 2.0
        scores[3, 0] = -math.inf
    if name == "not finite":
        scores[0] = -math.inf
        scores[1, c // 2] = math.nan
        scores[2, c - 1] = math.inf
    return scores, target


FORMS = ("counted", "ignored", "large", "infinite", "not finite")
ce._WIDEST_BLOCK = 64  # several blocks a row, and a part of one
for dtype in (torch.float32, torch.float16):
    for form in FORMS:
        for n, c in ((5, 33), (4, 128), (4, 201)):
            name = f"{form} {n}x{c} {dtype}"
            scores, target = rows(form, n, c, dtype)
            inner, whole = padded(scores)
            before = whole.clone()
            wide = scores.double()
            peak = wide.amax(-1)
            logsum = (wide - peak[:, None]).exp().sum(-1).log()
            loss, slope = eager(scores, target, 0.5)
            found_loss, found_peak, found_logsum = ce.launch_forward(inner, target, IGNORED)
            note(f"{name} loss", found_loss.sum(), loss, torch.float32, 1e-6)
            if form != "not finite":  # there a NaN may be in the sum alone
                note(f"{name} peak", found_peak, peak, torch.float32, 0.0)
            note(f"{name} logsum", found_logsum, logsum, torch.float32, 1e-6)
            grad = torch.tensor(0.5)
            made = ce.launch_backward(grad, inner, target, found_peak, found_logsum, IGNORED)
            assert made.stride() == torch.empty_like(inner).stride()
            note(f"{name} slope", made, slope, dtype, 2e-6)
            assert torch.equal(whole.nan_to_num(1e9), before.nan_to_num(1e9)), name
            # Transposed in memory, as is its gradient.
            turned = scores.t().contiguous().t()
            again = ce.launch_backward(grad, turned, target, found_peak, found_logsum, IGNORED)
            assert again.stride() == turned.stride()
            assert torch.equal(again.nan_to_num(1e9), made.nan_to_num(1e9))
            # In place, between rows that must stay.
            if form != "not finite":
                around = torch.full((n + 2, c), SENTINEL, dtype=dtype)
                around[1:-1] = scores
                lost = torch.empty(n)
                ce.launch_in_place(around[1:-1], target, IGNORED, lost)
                note(f"{name} in place", lost.sum(), loss, torch.float32, 1e-6)
                right = eager(scores, target, 1.0)[1]
                note(f"{name} slope in place", around[1:-1], right, dtype, 2e-6)
                assert around[0].eq(SENTINEL).all(), name
                assert around[-1].eq(SENTINEL).all(), name

head.CHUNK_BYTES, head.FEWEST_ROWS = 4 * 70 * 8, 8  # chunks of eight tokens
fused = fusion_of(torch.ops.graphaccel.linear_cross_entropy.default)
assert fused is not None
assert fused.forward is not None
assert fused.cuda_forward is not None
for dtype in (torch.float32, torch.float16):
    for form in ("counted", "ignored"):
        for biased in (False, True):
            generator = torch.Generator().manual_seed(3)
            x = torch.randn(3, 7, 16, generator=generator).to(dtype)
            weight = torch.randn(70, 16, generator=generator).to(dtype)
            bias = torch.randn(70, generator=generator).to(dtype) if biased else None
            target = torch.randint(0, 70, (3, 7), generator=generator)
            if form == "ignored":
                target[0, 2:] = IGNORED
            given = x, weight, bias, target, IGNORED, 5
            # As the reference on a GPU.
            right = head.forward_by_chunks(*given, head.loss_of_chunk, select=False)
            made = fused.cuda_forward(*given)
            for part, a, b in zip(("loss", "dx", "dweight", "dbias"), made, right, strict=True):
                name = f"head {form} {biased} {dtype} {part}"
                assert a.stride() == b.stride(), name
                note(name, a, b.double(), b.dtype, 2e-6)
print(json.dumps(found))
