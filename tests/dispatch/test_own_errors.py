"""What the model's own forward raises in mid-run is raised as it is, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import CaptureRefused
from tests.support.captures import captures_of
from tests.support.pool import Pool


class Fails(nn.Module):
    """Inputs [B, 4]; raises what `error` is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.error: type[Exception] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("of the forward")
        return self.body(x).square().mean()


def _trained(model: Fails, optimizer: torch.optim.Optimizer, caught: Any) -> list[float]:
    losses = []
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double()
        if step == 2:
            model.error = ValueError
            with pytest.raises(caught, match="of the forward"):
                model(x)
            with torch.no_grad(), pytest.raises(caught, match="of the forward"):
                model.eval()(x)
            model.train()
            model.error = None
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@captures_of("own errors")
def _apart(pins: dict[str, Any], caught: Any) -> float:
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Fails().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if planned:
            graphaccel.optimize(model, optimizer, **pins)
        results.append(_trained(model, optimizer, caught if planned else ValueError))
    return max(abs(a - b) for a, b in zip(*results, strict=True))


def test_on_one_device() -> None:
    assert _apart({"devices": 1}, ValueError) <= 1e-14


@pytest.mark.multiprocess
@pytest.mark.parametrize("zero", [0, 1])
def test_over_the_data_axis(pool: Pool, zero: int) -> None:
    pins = {"devices": 2, "data": 2, "zero": zero}
    for apart in pool.run(2, _apart, pins, ValueError):
        assert apart <= 1e-14


@pytest.mark.multiprocess
def test_where_no_process_has_the_model_it_is_said_in_the_refusal(pool: Pool) -> None:
    pins = {"devices": 2, "data": 2, "zero": 3}
    for apart in pool.run(2, _apart, pins, CaptureRefused):
        assert apart <= 1e-14
