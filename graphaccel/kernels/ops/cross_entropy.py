"""Fused cross entropy of logits that are also needed elsewhere.

    loss = Σ logsumexp(s) − s[label]            ds = (softmax(s) − one-hot) · g

Saved for the backward: the logits, which exist anyway, and two numbers per token; eager saves
log-softmax as well, as large as the logits. Read once in the forward, read and written once in the
backward: 2 + 4 bytes per element at 16 bits, against 18 + 26 of eager with an upcast.

Rows of logits do not fit registers. The kernels process them in blocks, with a running maximum and
sum for each position in a block (as in Milakov and Gimelshein, Online normalizer calculation for
softmax, 2018): one exponential per element, and one reduction across threads per row. For a head
and its loss (`linear_cross_entropy`) one kernel computes the loss and overwrites the logits by the
gradient: 6 bytes per element, 4 where the second read of a row hits the cache.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.jit import jit, next_power_of_2, tl, warps

IGNORED = Scalar(-100)
"""The label of rows that are not counted; -100 is torch's own default."""
_WIDEST_BLOCK = 4096  # 16 elements per thread; each has a maximum and a sum in registers


@jit
def _row(scores, target, c, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """Of one row its loss, label, maximum, and log-sum-exp relative to the maximum."""
    label = tl.load(target).to(tl.int64)
    # Read before anything is overwritten. A label out of bounds reads nothing, and gives NaN.
    known = (label >= 0) & (label < c)
    own = tl.load(scores + label, mask=known, other=float("nan")).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    start = 0
    while start < c:
        at = start + columns
        value = tl.load(scores + at, mask=at < c, other=float("-inf")).to(tl.float32)
        higher = value > peaks
        # Equal infinities differ by 0; the contribution of -inf is multiplied by 0 below.
        apart = tl.where(value == peaks, 0.0, value - peaks)
        factor = tl.exp(-tl.abs(apart))
        sums = tl.where(higher, sums * factor + 1.0, sums + factor)
        peaks = tl.where(higher, value, peaks)
        start += BLOCK
    peak = tl.max(peaks, 0)
    logsum = tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
    loss = tl.where(label != IGNORED, logsum - (own - peak), 0.0)
    return loss, label, peak, logsum


@jit
def _slope(scores, slope, label, peak, logsum, factor, c, BLOCK: tl.constexpr):
    """Of one row (softmax - one-hot) * factor."""
    columns = tl.arange(0, BLOCK)
    name = label.to(tl.int32)
    start = 0
    while start < c:
        at = start + columns
        inside = at < c
        value = tl.load(scores + at, mask=inside, other=0.0).to(tl.float32)
        share = tl.exp(value - peak - logsum)
        share = tl.where(at == name, share - 1.0, share) * factor
        tl.store(slope + at, share.to(slope.dtype.element_ty), mask=inside)
        start += BLOCK


@jit
def forward_kernel(
    scores, target, loss, peak, logsum, c, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    lost, _, highest, summed = _row(scores + row * stride, target + row, c, IGNORED, BLOCK)
    tl.store(loss + row, lost)
    tl.store(peak + row, highest)
    tl.store(logsum + row, summed)


@jit
def backward_kernel(
    grad_loss, scores, target, peak, logsum, slope, c, stride, slope_stride,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row).to(tl.int64)
    # Where all labels are ignored the gradient of the loss is infinite, and that of the logits 0.
    factor = tl.where(label != IGNORED, tl.load(grad_loss).to(tl.float32), 0.0)
    highest, summed = tl.load(peak + row), tl.load(logsum + row)
    into = slope + row * slope_stride
    _slope(scores + row * stride, into, label, highest, summed, factor, c, BLOCK)


@jit
def in_place_kernel(
    scores, target, loss, c, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row per program: its loss, and softmax - one-hot written over it."""
    row = tl.program_id(0).to(tl.int64)
    own = scores + row * stride
    lost, label, highest, summed = _row(own, target + row, c, IGNORED, BLOCK)
    tl.store(loss + row, lost)
    tl.debug_barrier()  # every thread has read the label's logit
    factor = tl.where(label != IGNORED, 1.0, 0.0)
    _slope(own, own, label, highest, summed, factor, c, BLOCK)


def block(c: int) -> int:
    """Columns of a row of c that a program reads at a time."""
    return min(next_power_of_2(c), _WIDEST_BLOCK)


def _fixed(c: int, ignored: int) -> dict[str, int]:
    return {"IGNORED": ignored, "BLOCK": block(c), "num_warps": warps(block(c))}


def _with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def launch_forward(scores: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of rows [n, c], 0 where ignored, their maxima, and log-sum-exp relative to these: [n]
    in float32, by Triton. Rows need not be adjacent. target: int64 [n]."""
    n, c = scores.shape
    scores, target = _with_whole_rows(scores), target.contiguous()
    loss, peak, logsum = (scores.new_empty(n, dtype=torch.float32) for _ in range(3))
    forward_kernel[(n,)](
        scores, target, loss, peak, logsum, c, scores.stride(0), **_fixed(c, ignored)
    )
    return loss, peak, logsum


def launch_backward(
    grad_loss: Tensor, scores: Tensor, target: Tensor, peak: Tensor, logsum: Tensor, ignored: int
) -> Tensor:
    """Gradient of the summed loss for rows [n, c], like `scores`, by Triton. grad_loss: a scalar on
    the device, read by the kernel."""
    n, c = scores.shape
    slope = torch.empty_like(scores)
    into = _with_whole_rows(slope)
    scores, target = _with_whole_rows(scores), target.contiguous()
    backward_kernel[(n,)](
        grad_loss, scores, target, peak.contiguous(), logsum.contiguous(), into, c,
        scores.stride(0), into.stride(0), **_fixed(c, ignored),
    )  # fmt: skip
    return slope if into is slope else slope.copy_(into)


def launch_in_place(scores: Tensor, target: Tensor, ignored: int, loss: Tensor) -> None:
    """Write losses of rows [n, c], 0 where ignored, to `loss`, float32 [n], by Triton; `scores`
    becomes the gradient of their sum. Rows need not be adjacent. target: int64 [n]."""
    n, c = scores.shape
    assert scores.stride(1) == 1
    assert loss.is_contiguous()
    in_place_kernel[(n,)](
        scores, target.contiguous(), loss, c, scores.stride(0), **_fixed(c, ignored)
    )


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@fusion
class cross_entropy:
    """Sum over counted rows of the cross entropy of logits [n, c]."""

    inputs = {"scores": T("n c"), "target": T("n", below="c"), "ignored": IGNORED}
    outputs = {"loss": T("", dtype="wide")}
    saved = {"peak": T("n", dtype="wide"), "logsum": T("n", dtype="wide")}
    whole = ("c",)
    tensor_parallel = False  # a tensor axis shards the vocabulary: no rank has full logits
    devices = ("cuda",)  # torch's CPU kernels are as fast; if pinned, it saves their memory
    patterns = (
        lambda scores, target, ignored: F.cross_entropy(
            scores.float(), target, reduction="sum", ignore_index=ignored
        ),
        lambda scores, target, ignored: F.cross_entropy(
            scores, target, reduction="sum", ignore_index=ignored
        ),
    )
    negatives = (
        lambda scores, target: F.cross_entropy(
            scores, target, reduction="sum", label_smoothing=0.1
        ),
    )

    def forward(scores, target, ignored):
        wide = _wide(scores)
        peak = wide.amax(-1)
        shifted = wide - peak[:, None]  # exact where it matters: large logits lose no precision
        counted = target != ignored
        label = torch.where(counted, target, 0)
        own = shifted.gather(1, label[:, None]).squeeze(1)
        logsum = shifted.exp_().sum(-1).log_()
        return torch.where(counted, logsum - own, 0).sum(), peak, logsum

    def fake(scores, target, ignored):
        kind = torch.float64 if scores.dtype == torch.float64 else torch.float32
        row = scores.new_empty(len(scores), dtype=kind)
        return scores.new_empty((), dtype=kind), row, torch.empty_like(row)

    def backward(grad_loss, scores, target, peak, logsum, ignored):
        slope = (_wide(scores) - peak[:, None]).sub_(logsum[:, None]).exp_()
        counted = target != ignored
        label = torch.where(counted, target, 0)
        slope.scatter_add_(1, label[:, None], slope.new_full((len(label), 1), -1.0))
        # Where all labels are ignored the gradient of the loss is infinite, and that of the logits
        # 0.
        factor = torch.where(counted, grad_loss.to(slope.dtype), 0.0)
        return slope.mul_(factor[:, None]).to(scores.dtype)

    def fake_backward(grad_loss, scores, target, peak, logsum, ignored):
        return torch.empty_like(scores)

    def cuda_forward(scores, target, ignored):
        loss, peak, logsum = launch_forward(scores, target, ignored)
        return loss.sum(), peak, logsum

    def cuda_backward(grad_loss, scores, target, peak, logsum, ignored):
        return launch_backward(grad_loss, scores, target, peak, logsum, ignored)
