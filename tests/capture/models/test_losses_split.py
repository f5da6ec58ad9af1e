"""Losses and layers that torch makes of other ops: two microbatches give eager's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: Mapping[str, Loss] = {
    "margin ranking": lambda h, y: F.margin_ranking_loss(h[:, 0], h[:, 1], y[:, 0].sign()),
    "hinge embedding": lambda h, y: F.hinge_embedding_loss(h, y.sign()),
    "poisson": lambda h, y: F.poisson_nll_loss(h, y.abs()),
    "cosine embedding": lambda h, y: F.cosine_embedding_loss(h, y, y[:, 0].sign()),
    "triplet": lambda h, y: F.triplet_margin_loss(h, y, h + y),
    "soft margin": lambda h, y: F.soft_margin_loss(h, y.sign()),
    "multilabel": lambda h, y: F.multilabel_soft_margin_loss(h, (y > 0).double()),
    "weighted positives": lambda h, y: F.binary_cross_entropy_with_logits(
        h, (y > 0).double(), pos_weight=torch.full((16,), 2.0, dtype=h.dtype)
    ),
    "circular padding": lambda h, y: F.pad(
        h.view(-1, 1, 4, 4), (1, 1, 1, 1), mode="circular"
    ).square().mean(),
    "reflected, unfolded, folded": lambda h, y: F.fold(
        F.unfold(F.pad(h.view(-1, 1, 4, 4), (1, 1, 1, 1), mode="reflect"), 3), (6, 6), 3
    ).square().mean(),
    "shuffled pixels": lambda h, y: F.pixel_shuffle(h.view(-1, 4, 2, 2), 2).square().mean(),
    "inverse": lambda h, y: torch.linalg.inv(
        h.view(-1, 4, 4) + 5 * torch.eye(4, dtype=h.dtype)
    ).mean(),
    "gated": lambda h, y: F.glu(h).mean() + F.logsigmoid(h).mean(),
    "middle values": lambda h, y: h.median(-1)[0].mean() + h.cummax(-1)[0].mean(),
}  # fmt: skip


class Model(nn.Module):
    """A layer before the loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(16, 16), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


@pytest.mark.parametrize("name", LOSSES)
def test_two_microbatches(name: str) -> None:
    torch.manual_seed(0)
    plain = Model(LOSSES[name]).double()
    planned = graphaccel.optimize(copy.deepcopy(plain), devices=1, microbatches=2)
    x, y = torch.randn(2, 8, 16, dtype=torch.float64)
    losses = [plain(x, y), planned(x, y)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0].item() - losses[1].item()) <= 1e-12
    for true, ours in zip(plain.parameters(), planned.parameters(), strict=True):
        assert (true.grad - ours.grad).abs().max() <= 1e-12
