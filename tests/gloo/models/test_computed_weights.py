"""Weights that hooks of torch.nn.utils compute before each forward, and complex buffers: eager's
weights under plans that shard parameters or leave them to other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune, spectral_norm, weight_norm

import graphaccel
from graphaccel import errors
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: list[dict[str, Any]] = [{"data": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}]


class Computed(nn.Module):
    """`forward(x, y)`: [8, 8] twice → loss."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        layers = [weight_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)]
        self.layers = nn.ModuleList(layers)
        prune.l1_unstructured(self.layers[2], "weight", amount=0.3)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        turned = torch.view_as_complex(x.view(-1, 4, 2)) * self.turn
        return F.mse_loss(torch.view_as_real(turned).flatten(1), y)


@captures_of("computed weights")
def _trained(pins: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Computed().double()
    model.turn = model.turn.to(torch.complex128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    x, y = torch.randn(2, 8, 8).double()
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    for _ in range(4):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


def _difference(pins: dict[str, Any]) -> float:
    return furthest(_trained(pins), _trained(None))


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_weights(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _difference, pins)) <= 1e-10


def _held() -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = model(torch.ones(2, 8)).sum()
    graphaccel.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.3), loss_fn=F.mse_loss, data=2, zero=3
    )
    with pytest.raises(errors.GraphMisuse) as caught:
        model(torch.ones(8, 8), torch.zeros(8, 8))
    del before
    return caught.value.what


def test_a_graph_from_before_holds_a_parameter(pool: Pool) -> None:
    for what in pool.run(2, _held):
        assert what.endswith("is part of an autograd graph from before the plan")
