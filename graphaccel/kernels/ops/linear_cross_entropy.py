"""Fused language model head and cross entropy, computed in chunks of tokens.

    loss = Σ_t logsumexp(W h_t + b) − (W h_t + b)[label_t]          over tokens whose label counts

The full logits, [tokens, vocabulary], never exist, nor does their gradient: each chunk's gradient
(softmax minus one-hot) is multiplied by the weight and the inputs immediately, and the backward
pass only scales. On a CPU tokens whose label is ignored are dropped before the head, so a prompt
that is masked out costs nothing. On a GPU dropping them would make the host wait for their number
in the middle of the step, so there they are computed, and their loss and gradient are 0.

As in Hsu et al., Liger Kernel, 2024, §3.2 (gradients in the forward) and PyTorch's chunked linear
cross entropy. Measured there: four chunks cost 7 % more time than full logits, 64 cost 57 %
(pytorch#124480). The plan decides the tokens per chunk (`planner.profile.chunk_rows`, from
`_chunks`); without a plan's decision, `CHUNK_BYTES` of logits.
"""

# The functions of a fusion's class have no `self`, which a type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.accumulate import add_product
from graphaccel.kernels.fusion import Chunks, Scalar, T, fusion
from graphaccel.kernels.jit import has_triton
from graphaccel.kernels.ops.cross_entropy import IGNORED, launch_in_place

CHUNK_BYTES = 64 << 20
FEWEST_ROWS = 128  # tokens per chunk: matmuls with fewer rows are bound by reading the weight
_ALIGNED = 16  # bytes
_CALLS = 10  # operations on each chunk besides its matmuls


def chunk_rows(vocabulary: int) -> int:
    """Tokens per chunk without a plan's decision: float32 logits of about `CHUNK_BYTES`."""
    return max(FEWEST_ROWS, CHUNK_BYTES // (4 * vocabulary) // FEWEST_ROWS * FEWEST_ROWS)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def loss_of_chunk(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignored: int,
    losses: Tensor,
) -> Tensor:
    """Write the losses of some tokens to `losses`, 0 where ignored; returns the gradient of their
    sum with respect to the logits."""
    counted = labels != ignored
    names = torch.where(counted, labels, 0)[:, None]
    scores = F.linear(rows, weight, bias).to(_wide(rows.dtype))
    scores = scores.sub_(scores.amax(-1, keepdim=True))
    own = scores.gather(1, names)
    total = scores.exp_().sum(-1, keepdim=True)
    losses.copy_(torch.where(counted, (total.log() - own).squeeze(1), 0))
    slope = scores.div_(torch.where(counted[:, None], total, float("inf")))
    slope.scatter_add_(1, names, -counted[:, None].to(slope.dtype))
    return slope.to(rows.dtype)


def forward_by_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignored: int,
    chunk: int,
    of_chunk: Callable[..., Tensor],
    *,
    select: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradients of x, weight and bias, `chunk` tokens at a time.

    x: [..., width]; weight: [vocabulary, width]; target: int64 [...]. of_chunk: as `loss_of_chunk`.
    select: leave out ignored tokens, whose number the host has to know; else they are computed,
    and count as nothing."""
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    kept = (labels != ignored).nonzero().squeeze(1) if select else labels
    every = len(kept) == len(labels)
    wide = _wide(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)  # under autocast it is still float32
    losses = torch.empty(len(kept), dtype=wide, device=x.device)
    dx = rows.new_empty(rows.shape) if every else rows.new_zeros(rows.shape)
    dweight = torch.empty(weight.shape, dtype=_wide(weight.dtype), device=weight.device)
    dbias = torch.zeros(len(weight), dtype=wide, device=x.device)
    count = chunk or chunk_rows(len(weight))
    for start in range(0, len(kept), count):
        some = slice(start, start + count)
        chosen = some if every else kept[some]
        part, names = rows[chosen], labels[chosen]
        slope = of_chunk(part, weight, bias, names, ignored, losses[some])
        if every:
            torch.mm(slope, weight, out=dx[some])
        else:
            dx[chosen] = slope @ weight
        add_product(dweight, slope.t(), part, first=start == 0)
        if bias is not None:
            dbias += slope.sum(0, dtype=wide)
        del slope  # before the next chunk's logits
    if not len(kept):
        dweight.zero_()
    return losses.sum(), dx.view(x.shape), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _missing(x: Tensor, weight: Tensor) -> int:
    """Words to add so that rows of logits are multiples of `_ALIGNED` bytes."""
    return -len(weight) % (_ALIGNED // x.dtype.itemsize)


def _cuda_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by Triton: the gradient overwrites the logits, in a dtype no wider than the rows'.

    cuBLAS has its fast kernels only for rows that start at multiples of 16 bytes, and GPT-2 has
    50,257 words: the weight is padded by words of zeros, whose logits, and so their gradients, are
    0 and which no loss reads.
    """
    words, missing = len(weight), _missing(x, weight)
    count = chunk or chunk_rows(words)
    if missing:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))

    def of_chunk(
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignored: int,
        losses: Tensor,
    ) -> Tensor:
        scores = F.linear(rows, weight, bias).to(rows.dtype)  # autocast may have narrowed them
        launch_in_place(scores[:, :words], labels, ignored, losses)
        return scores

    loss, dx, dweight, dbias = forward_by_chunks(
        x, weight, bias, target, ignored, count, of_chunk, select=False
    )
    if missing:
        dweight, dbias = dweight[:words], dbias[:words]
    return loss, dx, dweight, dbias


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del bias, target, ignored, chunk
    loss = x.new_empty((), dtype=_wide(x.dtype))
    return loss, x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))


def _chunks(x: Tensor, weight: Tensor, chunk: int) -> Chunks:
    """For each chunk: its logits, the gradient of its tokens and that of the weight, which is
    accumulated in float32. With Triton the gradient overwrites the logits, which are read twice and
    written once; otherwise there are eight passes, and two for the casts of 16 bits."""
    vocabulary, width = weight.shape
    tokens = max(1, x.numel() // width)
    rows = min(chunk or chunk_rows(vocabulary), tokens)
    narrow, wide = x.dtype.itemsize, _wide(x.dtype).itemsize
    passes = 8 * wide + (2 * (narrow + wide) if narrow < wide else 0)
    if x.device.type == "cuda" and wide == 4:
        passes = 3 * narrow
    summed = vocabulary * width * (2 * wide if narrow == wide else narrow + 2 * wide)
    return Chunks(
        rows=rows,
        times=-(-tokens // rows),
        products=((rows, vocabulary, width), (rows, width, vocabulary), (vocabulary, width, rows)),
        moved=rows * vocabulary * passes + summed,
        calls=_CALLS,
    )


def _loss(scores: Tensor, target: Tensor, ignored: int) -> Tensor:
    return F.cross_entropy(scores, target.reshape(-1), reduction="sum", ignore_index=ignored)


def _rows_first(x: Tensor, weight: Tensor, target: Tensor, ignored: int) -> Tensor:
    return _loss(F.linear(x.reshape(-1, x.shape[-1]), weight), target, ignored)


def _upcast_first(x: Tensor, weight: Tensor, target: Tensor, ignored: int) -> Tensor:
    return _loss(F.linear(x, weight).float().reshape(-1, len(weight)), target, ignored)


def _upcast_last(x: Tensor, weight: Tensor, target: Tensor, ignored: int) -> Tensor:
    return _loss(F.linear(x, weight).reshape(-1, len(weight)).float(), target, ignored)


def _kept(x: Tensor, weight: Tensor, target: Tensor, ignored: int) -> Tensor:
    """In the model's own dtype, as in BERT and T5; in float32 it is the same as the others."""
    return _loss(F.linear(x, weight).reshape(-1, len(weight)), target, ignored)


def _kept_bias(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, ignored: int) -> Tensor:
    return _loss(F.linear(x, weight, bias).reshape(-1, len(weight)), target, ignored)


def _upcast_first_bias(
    x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, ignored: int
) -> Tensor:
    return _loss(F.linear(x, weight, bias).float().reshape(-1, len(weight)), target, ignored)


def _upcast_last_bias(
    x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, ignored: int
) -> Tensor:
    return _loss(F.linear(x, weight, bias).reshape(-1, len(weight)).float(), target, ignored)


@fusion
class linear_cross_entropy:
    """Sum over counted tokens of the cross entropy of x · weightᵀ + bias."""

    inputs = {
        "x": T("... h"),
        "weight": T("v h"),
        "bias": T("v", optional=True),
        "target": T("...", below="v"),
        "ignored": IGNORED,
        "chunk": Scalar(0, (8,)),
    }
    outputs = {"loss": T("", dtype="wide")}
    saved = {"dx": T("... h"), "dweight": T("v h"), "dbias": T("v")}
    whole = ("h", "v")
    compiled = True
    tensor_parallel = False  # a tensor axis shards the vocabulary: no rank has full logits
    sizes = {"v": (64, 97), "h": (16, 33)}
    patterns = (
        _upcast_first, _upcast_last, _upcast_first_bias, _upcast_last_bias, _kept, _kept_bias,
        _rows_first,
    )  # fmt: skip
    negatives = (
        lambda x, weight, target: F.cross_entropy(
            F.linear(x, weight).reshape(-1, len(weight)),
            target.reshape(-1),
            reduction="sum",
            label_smoothing=0.1,
        ),
    )
    inline = True
    fake = _fake

    def forward(x, weight, bias, target, ignored, chunk):
        on_host = x.device.type == "cpu"
        return forward_by_chunks(
            x, weight, bias, target, ignored, chunk, loss_of_chunk, select=on_host
        )

    def cuda_forward(x, weight, bias, target, ignored, chunk):
        return _cuda_forward(x, weight, bias, target, ignored, chunk)

    def backward(grad_loss, dx, dweight, dbias, wanted):
        """The gradients are already computed, for a loss gradient of one. Where no label counts
        they are 0 and the mean's is infinite: 0 stays 0, as in eager."""
        most = torch.finfo(grad_loss.dtype).max
        factor = grad_loss.clamp(-most, most)
        built = (dx, dweight, dbias)
        return tuple(g * factor if on else None for g, on in zip(built, wanted, strict=False))

    def legal(x, weight, **_):
        if len(weight) < 32:
            return f"a head of {len(weight)} classes has no logits to save"
        return None

    def flops(x, weight, **_):
        return 6 * x.numel() * weight.shape[0]

    def chunks(x, weight, chunk, **_):
        return _chunks(x, weight, chunk)

    def workspace(x, weight, chunk, **_):
        """Of one chunk the scores (for 16 bits in that dtype and in float32; with Triton only in
        x's dtype, and the padded weight); for 16 bits the gradient of the weight in float32, and
        that of one chunk."""
        rows, wide = _chunks(x, weight, chunk).rows, _wide(x.dtype)
        scores = rows * len(weight)
        if x.device.type == "cuda" and has_triton() and wide == torch.float32:
            product = weight.numel() * (x.dtype.itemsize + wide.itemsize) if x.dtype != wide else 0
            padded = weight.numel() * x.dtype.itemsize if _missing(x, weight) else 0
            return scores * x.dtype.itemsize + product + padded
        if wide == x.dtype:
            return scores * wide.itemsize
        scores *= x.dtype.itemsize + wide.itemsize
        return max(scores, weight.numel() * x.dtype.itemsize) + weight.numel() * wide.itemsize
