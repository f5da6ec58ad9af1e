"""Cross entropy of logits that are needed elsewhere too.

    loss = Σ logsumexp(s) − s[label]            ds = (softmax(s) − one-hot) · g

Kept for the backward: the logits, which are there anyway, and two numbers a token; eager keeps
log-softmax as well, as large as the logits. Read once in the forward, read and written once in the
backward: 2 + 4 bytes an element at 16 bits, against 18 + 26 of eager with an upcast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.kernels.fusion import T, fusion

IGNORED = -100


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@fusion
class cross_entropy:
    """Sum over counted rows of the cross entropy of logits [n, c]."""

    inputs = {"scores": T("n c"), "target": T("n", below="c")}
    outputs = {"loss": T("", dtype="wide")}
    saved = {"peak": T("n", dtype="wide"), "logsum": T("n", dtype="wide")}
    whole = ("c",)
    tensor_parallel = False  # a tensor axis shards the vocabulary: then no rank has whole logits
    devices = ("cuda",)  # torch's CPU kernels are as fast; asked for, it saves their memory
    patterns = (
        lambda scores, target: F.cross_entropy(scores.float(), target, reduction="sum"),
        lambda scores, target: F.cross_entropy(scores, target, reduction="sum"),
    )
    negatives = (
        lambda scores, target: F.cross_entropy(scores, target, reduction="sum", ignore_index=0),
        lambda scores, target: F.cross_entropy(
            scores, target, reduction="sum", label_smoothing=0.1
        ),
    )

    def forward(scores, target):
        wide = _wide(scores)
        peak = wide.amax(-1)
        shifted = wide - peak[:, None]  # exact where it matters: logits of a thousand lose nothing
        counted = target != IGNORED
        label = torch.where(counted, target, 0)
        own = shifted.gather(1, label[:, None]).squeeze(1)
        logsum = shifted.exp_().sum(-1).log_()
        return torch.where(counted, logsum - own, 0).sum(), peak, logsum

    def fake(scores, target):
        kind = torch.float64 if scores.dtype == torch.float64 else torch.float32
        row = scores.new_empty(len(scores), dtype=kind)
        return scores.new_empty((), dtype=kind), row, torch.empty_like(row)

    def backward(grad_loss, scores, target, peak, logsum):
        slope = (_wide(scores) - peak[:, None]).sub_(logsum[:, None]).exp_()
        counted = (target != IGNORED).to(slope.dtype)
        label = torch.where(target == IGNORED, 0, target)
        slope.scatter_add_(1, label[:, None], slope.new_full((len(label), 1), -1.0))
        return slope.mul_((counted * grad_loss)[:, None]).to(scores.dtype)

    def fake_backward(grad_loss, scores, target, peak, logsum):
        return torch.empty_like(scores)
