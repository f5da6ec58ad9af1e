"""Random numbers that all rows share (noise on weights, a gate): eager's under any split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

Use = Callable[["Noisy", Tensor], Tensor]


class Noisy(nn.Module):
    """`forward(x, y)`: [8, 6] twice → loss; use: what lies between the layers."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(6, 6), nn.Linear(6, 6), use

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.use(self, x).tanh()), y)


def weight_noise(model: Noisy, x: Tensor) -> Tensor:
    weight = model.first.weight
    return F.linear(x, weight + 0.3 * torch.randn_like(weight), model.first.bias)


def gate(model: Noisy, x: Tensor) -> Tensor:
    return x + (torch.rand(()) < 0.5).to(x.dtype) * model.first(x)


def features(model: Noisy, x: Tensor) -> Tensor:
    kept = torch.empty(6, dtype=x.dtype).bernoulli_(0.5)
    return model.first(x * kept)[:, torch.randperm(6)] * torch.empty_like(kept).uniform_(0.5, 2)


USES: dict[str, Use] = {"weight noise": weight_noise, "gate": gate, "features": features}
PLANS: list[dict[str, Any]] = [
    {"data": 2},
    {"data": 2, "microbatches": 2},
    {"pipeline": 2, "microbatches": 2},
    {"tensor": 2},
]


def _trained(name: str, pins: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Noisy(USES[name]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = torch.randn(2, 8, 6).double()
    losses = []
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    torch.manual_seed(7)
    with captures_of(f"shared draws {name}"):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    state = model.state_dict() if pins is None else graphaccel.full_state_dict(model)
    return losses, {k: v.clone() for k, v in state.items()}


def _difference(name: str, pins: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    (want, true), (got, made) = _trained(name, None), _trained(name, pins)
    return furthest(made, true), got, want


@pytest.mark.parametrize("pins", PLANS, ids=str)
@pytest.mark.parametrize("name", USES)
def test_they_are_drawn_once(pool: Pool, name: str, pins: dict[str, Any]) -> None:
    for error, got, want in pool.run(2, _difference, name, pins):
        assert error <= 1e-10
        assert got == pytest.approx(want, rel=1e-10)


def _apart() -> str:
    model = Noisy(weight_noise).double()
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.3), data=2)
    batch = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    model(*batch).backward()
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(errors.BatchesDiffer) as caught:
        model(*batch)
    return caught.value.what


def test_ranks_that_would_draw_other_numbers(pool: Pool) -> None:
    assert pool.run(2, _apart) == ["random", "random"]


class Timed(nn.Module):
    """`forward(x, y)`: [8, 6] twice → loss and the step in time that is drawn for each row."""

    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("rates", torch.ones(100, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        time = torch.randint(0, 100, (x.shape[0],), device=x.device)
        return {"loss": F.mse_loss(self.layer(x) * self.rates[time, None], y), "time": time}


def _times(pins: dict[str, Any]) -> tuple[float, list[int]]:
    torch.manual_seed(0)
    plain = Timed().double()
    model = copy.deepcopy(plain)
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.3), outputs="all", **pins)
    batch = torch.randn(2, 8, 6).double()
    out = model(*batch)
    out["loss"].backward()
    plain(*batch)["loss"].backward()
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)
    return out["loss"].item() - plain(*batch)["loss"].item(), out["time"].tolist()


@pytest.mark.parametrize("pins", [{"data": 2}, {"data": 2, "microbatches": 2}], ids=str)
def test_numbers_that_are_drawn_for_each_row(pool: Pool, pins: dict[str, Any]) -> None:
    for off, drawn in pool.run(2, _times, pins):
        assert abs(off) < 1e-12
        assert min(drawn) >= 0
        assert max(drawn) < 100
        assert drawn[:4] != drawn[4:]
