"""A queue of the latest examples and a momentum encoder, as He et al. 2020 (MoCo) write them: both
are buffers that a forward updates from the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

ROWS, QUEUED = 8, 16


class Contrasting(nn.Module):
    """`forward(a, b)`: two views, [rows, 4] → loss. way: how the key's weights follow."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        layers = (nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 6))
        self.query = nn.Sequential(*layers)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, QUEUED), dim=0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        query = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            for old, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.way == "in place":
                    old.data.mul_(0.9).add_(new.data, alpha=0.1)
                else:
                    old.data = old.data * 0.9 + new.data * 0.1
            key = F.normalize(self.key(b), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        loss = F.cross_entropy(scores / 0.2, torch.zeros(len(query), dtype=torch.long))
        with torch.no_grad():
            self.queue.copy_(torch.cat([key.T, self.queue[:, : -len(key)]], 1))
        return loss


@captures_of("queue")
def _trained(way: str, pins: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Contrasting(way).double()
    with torch.no_grad():
        model.query[0].weight += 0.1  # the first step moves the key, too
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    for _ in range(3):
        optimizer.zero_grad()
        model(*torch.randn(2, ROWS, 4).double()).backward()
        optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


def _difference(way: str, pins: dict[str, Any]) -> float:
    return furthest(_trained(way, pins), _trained(way, None))


@pytest.mark.parametrize(
    "pins",
    [{"data": 2, "zero": 3}, {"data": 1, "pipeline": 2, "microbatches": 2}],
    ids=["data", "pipeline"],
)
@pytest.mark.parametrize("way", ["in place", "data"])
def test_as_eager_mode(pool: Pool, way: str, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _difference, way, pins)) <= 1e-12
