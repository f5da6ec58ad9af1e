"""Optimizers that read whole matrices: as on one device where each is whole, else refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


class Matrices(nn.Module):
    """`forward(x, y)`: [B, 6], [B] → mean cross entropy; every parameter is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(torch.tanh(self.first(x))), y)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), lr=0.05)


def _refused_or_right(name: str, pins: dict[str, Any], refused: bool) -> str | float:
    torch.manual_seed(0)
    plain = Matrices().double()
    ours = copy.deepcopy(plain)
    optimizers = [_optimizer(name, m) for m in (plain, ours)]
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    if refused:
        with pytest.raises(errors.NotElementwise) as caught:
            graphaccel.optimize(ours, optimizers[1], devices=2, example_batch=(x, y), **pins)
        return str(caught.value).splitlines()[0]
    graphaccel.optimize(ours, optimizers[1], devices=2, check="off", **pins)
    for _ in range(3):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = graphaccel.full_state_dict(ours)
    return max((state[n] - v).abs().max().item() for n, v in plain.state_dict().items())


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@pytest.mark.parametrize("pins", [{"data": 2, "zero": 0}, {"pipeline": 2}], ids=str)
def test_whole_matrices_are_stepped_as_on_one_device(
    pool: Pool, name: str, pins: dict[str, Any]
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    furthest = 1e-12
    assert max(pool.run(2, _refused_or_right, name, pins, False)) < furthest


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@pytest.mark.parametrize("pins", [{"data": 2, "zero": 1}, {"tensor": 2}], ids=str)
def test_parts_of_matrices_are_refused(pool: Pool, name: str, pins: dict[str, Any]) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    said = pool.run(2, _refused_or_right, name, pins, True)
    assert said == [f"error[GA211]: {name} does not work on shards of parameters"] * 2
