"""Two models in one script, each with its optimizer and its plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphaccel
from tests.support.pool import Pool

mse = nn.functional.mse_loss
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one plan each": ({"data": 2, "zero": 3}, {"pipeline": 2}),
    "the same plan": ({"data": 2}, {"data": 2}),
}


def model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    built = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    return built, torch.optim.Adam(built.parameters(), lr=0.05)


def losses(plans: tuple[dict[str, Any], dict[str, Any]] | None) -> list[float]:
    (one, first), (other, second) = model(0), model(1)
    if plans is not None:
        for each, optimizer, pins in ((one, first, plans[0]), (other, second, plans[1])):
            graphaccel.optimize(each, optimizer, devices=2, loss_fn=mse, **pins)
    torch.manual_seed(2)
    results = []
    for _ in range(3):
        x, y = torch.randn(8, 4).double(), torch.randn(8, 6).double()
        for each, optimizer, target in ((one, first, y), (other, second, y * 2)):
            loss = each(x, target) if plans is not None else mse(each(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.item())
    return results


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_one_device(pool: Pool, name: str) -> None:
    expected = losses(None)
    for got in pool.run(2, losses, PLANS[name]):
        assert got == pytest.approx(expected, abs=1e-12)
