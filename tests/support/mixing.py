"""Losses that are no sum over the examples of a batch, and a small model that ends in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Two layers, a temperature and two log-variances; x, y [B, 6], float64."""

    def __init__(self, loss: Loss, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 6)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.variances = nn.Parameter(torch.tensor([0.2, -0.1]))
        self.loss = loss
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.encode(x), y)


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    """x, y [size, 6]."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, size, 6, generator=generator, dtype=torch.float64)
    return x, y


def rmse(_: Model, h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(h, y).sqrt()


def dice(_: Model, h: Tensor, y: Tensor) -> Tensor:
    p, t = h.sigmoid(), (y > 0).to(h.dtype)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def infonce(model: Model, h: Tensor, y: Tensor) -> Tensor:
    scores = F.normalize(h, dim=1) @ F.normalize(y, dim=1).T * model.temperature.exp()
    return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def clip(model: Model, h: Tensor, y: Tensor) -> Tensor:
    other = F.normalize(model.encode(y), dim=1)
    scores = F.normalize(h, dim=1) @ other.T * model.temperature.exp()
    own = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def supervised_contrastive(_: Model, h: Tensor, y: Tensor) -> Tensor:
    z, labels = F.normalize(h, dim=1), y.argmax(1) % 2
    scores = z @ z.T / 0.2
    itself = torch.eye(scores.shape[0], dtype=torch.bool)
    alike = (labels[:, None] == labels[None, :]) & ~itself
    others = torch.logsumexp(scores.masked_fill(itself, -1e9), 1, keepdim=True)
    return -(((scores - others) * alike).sum(1) / alike.sum(1).clamp(min=1)).mean()


def balance(_: Model, h: Tensor, y: Tensor) -> Tensor:
    gates = h.softmax(1)
    chosen = F.one_hot(gates.argmax(1), 6).to(h.dtype)
    return F.mse_loss(h, y) + 6 * (gates.mean(0) * chosen.mean(0)).sum()


def product_of_means(_: Model, h: Tensor, y: Tensor) -> Tensor:
    return (h - y).abs().mean() * h.pow(2).mean()


def uncertainty(model: Model, h: Tensor, y: Tensor) -> Tensor:
    tasks = torch.stack([F.mse_loss(h, y), F.l1_loss(h, y)])
    return ((-model.variances).exp() * tasks + model.variances).sum()


def hardest_triplets(_: Model, h: Tensor, y: Tensor) -> Tensor:
    distance = (h[:, None] - h[None]).square().sum(-1)
    alike = (y[:, :1] > 0) == (y[:, :1] > 0).T
    positive, negative = (distance * alike).amax(1), (distance + 1e3 * alike).amin(1)
    return F.relu(positive - negative + 0.5).mean()


def correlation(_: Model, h: Tensor, y: Tensor) -> Tensor:
    a, b = h.flatten() - h.mean(), y.flatten() - y.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm())


LOSSES: Mapping[str, Loss] = {
    each.__name__: each
    for each in (
        rmse, dice, infonce, clip, supervised_contrastive, balance, product_of_means, uncertainty,
        hardest_triplets, correlation,
    )
}  # fmt: skip
