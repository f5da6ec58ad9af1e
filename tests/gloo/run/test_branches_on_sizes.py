"""A forward that branches on a size which no capture has seen: each size takes its own branch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

SIZES = ((8, 4), (4, 4), (32, 4), (8, 20), (8, 4))
PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero": {"data": 2, "zero": 3},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}


class Net(nn.Module):
    """Inputs [B, T, 4] → loss; large batches and long rows are weighed otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if x.shape[0] > 16:
            h = h * 7
        if x.shape[1] > 16:
            h = h + 1
        # The same operators, with another number.
        scale = 3.0 if x.shape[0] > 20 else 2.0
        return self.second(h * scale).square().mean() * (5 if x.shape[1] > 18 else 4)


def _losses(pins: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    results = []
    for rows, length in SIZES:
        x = torch.randn(rows, length, 4).double()
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            results += [loss.item(), model(x.flip(0)[: max(4, rows // 2)]).item()]
        model.train()
    return results


def test_one_device() -> None:
    assert _losses({"devices": 1}) == pytest.approx(_losses(None), rel=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_two_processes(pool: Pool, plan: str) -> None:
    for found in pool.run(2, _losses, PLANS[plan]):
        assert found == pytest.approx(_losses(None), rel=1e-12)
