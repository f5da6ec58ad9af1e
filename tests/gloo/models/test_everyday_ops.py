"""Ops of everyday models over two data ranks and over a pipeline's microbatches, beside eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

import graphaccel
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Head(nn.Module):
    """Losses of (hidden values [b, 6], a matrix [6, 6], targets [b, 6]), summed, each on a layer of
    its own; `forward(x, y)` → loss."""

    def __init__(self, *losses: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in losses)
        self.matrix = nn.Parameter(2 * torch.eye(6) + 0.3 * torch.randn(6, 6))
        self.last = nn.Linear(6, 6)
        self.losses = losses

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = F.mse_loss(self.last(x), y)
        for layer, loss in zip(self.layers, self.losses, strict=True):
            total = total + loss(layer(x), self.matrix, y)
        return total


def _pairs(h: Tensor) -> Tensor:
    return h.view(-1, 2, 3)


def _spectrum(h: Tensor, window: Tensor) -> Tensor:
    """Magnitudes of three frequencies in windows of four values, two of them apart: [b, 3, 4]."""
    return torch.stft(h, 4, 2, 3, window, return_complex=True).abs()


def _definite(h: Tensor) -> Tensor:
    return _pairs(h) @ _pairs(h).mT + torch.eye(2, dtype=h.dtype)


def _drawn(h: Tensor) -> Tensor:
    """All six values of each row in a random order, on which their sum does not depend."""
    return h.gather(1, torch.multinomial(h.softmax(1), 6))


WEIGHTS: tuple[Loss, ...] = (
    lambda h, w, y: F.mse_loss(h @ torch.linalg.inv(w), y),
    lambda h, w, y: F.mse_loss(h @ w, y) - torch.linalg.slogdet(w)[1],
    lambda h, w, y: F.mse_loss(torch.linalg.solve(w, h.T).T, y),
    lambda h, w, y: F.mse_loss(torch.cdist(h, w), y),
)
MATRICES: tuple[Loss, ...] = (
    lambda h, w, y: torch.linalg.svdvals(_pairs(h)).pow(3).sum() + h.mul(w[0]).mean(),
    lambda h, w, y: torch.linalg.eigvalsh(_definite(h)).exp().mean(),
    lambda h, w, y: torch.linalg.cholesky(_definite(h)).pow(3).mean(),
    lambda h, w, y: F.mse_loss(torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(w[0]), n=6), y),
    lambda h, w, y: F.mse_loss(torch.linalg.pinv(_pairs(h)).flatten(1), y),
    lambda h, w, y: F.mse_loss(_spectrum(h, w[0, :3]), _spectrum(y, w[1, :3].detach())),
)
PLACES: tuple[Loss, ...] = (
    lambda h, w, y: F.mse_loss(h.new_zeros(len(h), 4).index_add(1, _ids(6, 4), h), y[:, :4]),
    lambda h, w, y: F.mse_loss(h.index_copy(1, torch.tensor([2, 0]), y[:, :2]), y),
    lambda h, w, y: F.mse_loss(h.scatter_reduce(1, (y.abs() * 2).long() % 6, y, "amax"), y),
    lambda h, w, y: F.mse_loss(torch.logcumsumexp(h, 1) + torch.cummax(h, 1)[0], y),
    lambda h, w, y: F.mse_loss(_drawn(h).sum(1), y[:, 0]),
    lambda h, w, y: F.mse_loss(h.median(1)[0] * torch.linspace(0, 1, 6)[3], y[:, 0]),
)
REPEATS: tuple[Loss, ...] = (
    lambda h, w, y: F.mse_loss((h.repeat(3, 1) @ w).tanh().view(3, -1, 6).amax(0), y),
    lambda h, w, y: F.mse_loss(h.repeat(1, 2)[:, 3:9], y),
    lambda h, w, y: F.mse_loss(w[:1].repeat(len(h), 1) * h, y),
    lambda h, w, y: F.mse_loss(h.repeat(2, 2, 1).tanh().view(4, -1, 6).mean(0), y),
)
LOSSES: tuple[Loss, ...] = (
    lambda h, w, y: F.multi_margin_loss(h, y.argmax(1)),
    lambda h, w, y: F.multilabel_margin_loss(h, y.argsort(1)),
    lambda h, w, y: F.multilabel_soft_margin_loss(h, (y > 0).to(h.dtype)),
    lambda h, w, y: F.hinge_embedding_loss(h, y.sign()),
    lambda h, w, y: F.cosine_embedding_loss(h, y, y[:, 0].sign()),
    lambda h, w, y: F.triplet_margin_loss(h, y, h.flip(1)),
    lambda h, w, y: F.kl_div(h.log_softmax(1), y.softmax(1), reduction="batchmean"),
)


def _ids(count: int, below: int) -> Tensor:
    return torch.tensor([i % below for i in range(count)])


class Bags(nn.Module):
    """Embedding bags of all kinds, and a bilinear layer; `forward(x, y)` → loss."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [(mode, padding) for mode in ("mean", "sum", "max") for padding in (None, 0)]
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(20, 6, mode=mode, padding_idx=padding) for mode, padding in kinds
        )
        self.mixed, self.last = nn.Bilinear(6, 6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ids = (x.abs() * 5).long() % 20
        ids[:, 4:] = 0
        ids[::4] = 0  # bags of padding alone
        mean, total, extreme = (self.bags[i](ids) + self.bags[i + 1](ids) for i in (0, 2, 4))
        total_table = self.bags[2].weight
        weighted = F.embedding_bag(ids, total_table, per_sample_weights=y, mode="sum")
        return F.mse_loss(self.last(self.mixed(mean + total, extreme + weighted)), y)


class Orthogonal(nn.Module):
    """Weights that are kept orthogonal: what is done to them reads no batch."""

    def __init__(self, maps: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(orthogonal(nn.Linear(6, 6), orthogonal_map=m) for m in maps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(x, y)


class Images(nn.Module):
    """MobileNetV3's block and DCGAN's transposed convolutions; `forward(x, y)` → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.GroupNorm(2, 8), nn.Hardswish(),
        )  # fmt: skip
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.view(-1, 3, 1, 2).repeat(1, 1, 8, 4)
        h = self.down(x)
        h = F.pad(
            F.interpolate(h * self.gate(h), scale_factor=2, mode="bicubic"), [1] * 4, "reflect"
        )
        return F.mse_loss(F.adaptive_max_pool2d(self.up(h), 4), F.avg_pool2d(x, 2)) + y.mean()


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "weights": lambda: Head(*WEIGHTS),
    "matrices": lambda: Head(*MATRICES),
    "places": lambda: Head(*PLACES),
    "losses": lambda: Head(*LOSSES),
    "repeats": lambda: Head(*REPEATS),
    "bags": Bags,
    "orthogonal": lambda: Orthogonal(("cayley", "householder")),
    "orthogonal exponential": lambda: Orthogonal(("matrix_exp",)),
    "images": Images,
}


def _trained(name: str, pins: Mapping[str, Any]) -> float:
    states = []
    x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    for planned in (False, True):
        torch.manual_seed(0)
        model = MODELS[name]().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if planned:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
        with captures_of(f"everyday ops {name}"):
            for _ in range(2):
                optimizer.zero_grad()
                model(x, y).backward()
                optimizer.step()
        states.append(graphaccel.full_state_dict(model) if planned else model.state_dict())
    return furthest(*states)


@pytest.mark.parametrize("name", MODELS)
def test_over_data(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _trained, name, {"data": 2})) <= 1e-10


@pytest.mark.parametrize("name", [n for n in MODELS if n != "orthogonal exponential"])
def test_over_microbatches(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _trained, name, {"pipeline": 2, "microbatches": 2})) <= 1e-10
