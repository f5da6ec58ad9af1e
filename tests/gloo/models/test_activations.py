"""Activations that torch does not tag elementwise, over two data ranks and over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.leaky_relu, F.elu, F.selu, F.celu, F.softplus, F.relu6, F.hardtanh, F.hardswish,
    F.hardsigmoid, F.hardshrink, F.softshrink, F.mish, F.silu, F.logsigmoid, F.tanhshrink,
    F.softsign, lambda x: F.threshold(x, 0.1, 0.2), lambda x: F.glu(torch.cat([x, -x], -1)),
    lambda x: torch.where(x > 0, x, torch.nan).nan_to_num(),
)  # fmt: skip


class Activations(nn.Module):
    """A layer for each activation; `forward(x, y)` → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in ACTIVATIONS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, activation in zip(self.layers, ACTIVATIONS, strict=True):
            x = x + activation(layer(x))
        return F.mse_loss(x, y)


@captures_of("scripts")
def _trained(pins: Mapping[str, Any]) -> float:
    states = []
    x, y = torch.linspace(-2, 2, 96, dtype=torch.float64).view(2, 8, 6).sin()
    for planned in (False, True):
        torch.manual_seed(0)
        model = Activations().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if planned:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
        for _ in range(2):
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
        states.append(graphaccel.full_state_dict(model) if planned else model.state_dict())
    return furthest(*states)


@pytest.mark.parametrize(
    "pins",
    [{"data": 2}, pytest.param({"pipeline": 2, "microbatches": 2}, marks=pytest.mark.release)],
    ids=str,
)
def test_activations(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _trained, pins)) <= 1e-12
