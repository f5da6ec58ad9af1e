"""Parameters that the script freezes and unfreezes after the step is captured: eager's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphaccel
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


class Tuned(nn.Module):
    """A base and a head; `forward(x, y)`: [8, 8] twice → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(self.base(x).tanh()), y)


def _trained(pins: dict[str, Any] | None, *, group: bool) -> dict[str, torch.Tensor]:
    """Weights after two steps of the head alone and two of both. group: the optimizer is given the
    base when it is unfrozen."""
    torch.manual_seed(0)
    model = Tuned().double()
    x, y = torch.randn(2, 8, 8).double()
    trained = model.head if group else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    if pins is not None:
        graphaccel.optimize(model, optimizer, example_batch=(x, y), **pins)
    model.base.requires_grad_(False)
    for step in range(4):
        if step == 2:
            model.base.requires_grad_(True)
            if group:
                optimizer.add_param_group({"params": list(model.base.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


@captures_of("unfrozen")
def _difference(pins: dict[str, Any], group: bool) -> float:
    return furthest(_trained(pins, group=group), _trained(None, group=group))


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(
    "pins",
    [
        {"data": 2},
        {"data": 2, "zero": 2},
        {"data": 2, "zero": 3},
        {"pipeline": 2, "microbatches": 2},
    ],
)
def test_frozen_after_the_capture(pool: Pool, pins: dict[str, Any], group: bool) -> None:
    assert max(pool.run(2, _difference, pins, group)) <= 1e-10


def _lengths(pins: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Weights after steps on two shapes of batches, the second with a base that was frozen, and
    unfrozen later."""
    torch.manual_seed(0)
    model = Tuned().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    for step, trained in enumerate((True, True, False, False, True)):
        model.base.requires_grad_(trained)
        x, y = torch.randn(2, 8, *([3] if step > 1 else []), 8).double()
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


@captures_of("unfrozen, two shapes")
def _difference_of_lengths(pins: dict[str, Any]) -> float:
    return furthest(_lengths(pins), _lengths(None))


@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": 2, "microbatches": 2}])
def test_captured_again_while_frozen(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _difference_of_lengths, pins)) <= 1e-10
