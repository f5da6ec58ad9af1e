"""Losses of variances over the batch, over data ranks and over microbatches: eager's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.errors import PlanDiffers
from graphaccel.runtime.session import Session
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


def _off_diagonal(c: Tensor) -> Tensor:
    return c.flatten()[:-1].view(len(c) - 1, len(c) + 1)[:, 1:].flatten()


def vicreg(z: Tensor, w: Tensor) -> Tensor:
    """Variance, invariance, covariance (Bardes et al. 2022)."""
    total = 25 * F.mse_loss(z, w)
    for x in (z, w):
        x = x - x.mean(dim=0)
        covariance = x.T @ x / (len(x) - 1)
        spread = F.relu(1 - torch.sqrt(x.var(dim=0) + 1e-4)).mean()
        total = total + 25 * spread + _off_diagonal(covariance).pow(2).sum() / x.shape[1]
    return total


def barlow_twins(z: Tensor, w: Tensor) -> Tensor:
    """Cross-correlation of standardised features (Zbontar et al. 2021)."""
    z, w = (z - z.mean(0)) / z.std(0), (w - w.mean(0)) / w.std(0)
    c = z.T @ w / len(z)
    return (c.diagonal() - 1).pow(2).sum() + 5e-3 * _off_diagonal(c).pow(2).sum()


def several(z: Tensor, w: Tensor) -> Tensor:
    """Every spelling."""
    var, mean = torch.var_mean(z, 0)
    std, centre = torch.std_mean(w, dim=0, correction=2, keepdim=True)
    made = z.var() + w.std() + (var * mean).sum() + (std * centre).sum()
    return made + torch.cov(z.T).pow(2).sum() + torch.corrcoef(w.T).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vicreg": vicreg,
    "barlow twins": barlow_twins,
    "several": several,
}


class ShardedOptimizer(nn.Module):
    """Two branches, with BatchNorm where it is given; `forward(x, y)`: [8, 8] twice → loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], norm: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.norm, self.loss = nn.Linear(8, 8), nn.Linear(8, 8), norm, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.norm(self.one(x).tanh()), self.two(y).tanh())


NORMS = {
    "cumulative": partial(nn.BatchNorm1d, 8, momentum=None),
    "untracked": partial(nn.BatchNorm1d, 8, track_running_stats=False),
}


def _trained(name: str, pins: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    norm = NORMS.get(name, nn.Identity)()
    model = ShardedOptimizer(LOSSES.get(name, F.mse_loss), norm).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(3, 2, 8, 8).double()
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    with captures_of(f"batch statistics {name}"):
        for batch in batches:
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


def _difference(name: str, pins: dict[str, Any]) -> float:
    return furthest(_trained(name, pins), _trained(name, None))


@pytest.mark.parametrize("name", [*LOSSES, *NORMS])
def test_over_data(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _difference, name, {"data": 2})) <= 1e-10


@pytest.mark.parametrize("name", LOSSES)
def test_over_microbatches(pool: Pool, name: str) -> None:
    pins = {"data": 2, "microbatches": 2}
    assert max(pool.run(2, _difference, name, pins)) <= 1e-10


class Centred(nn.Module):
    """The running mean of an InstanceNorm behind a BatchNorm is zero up to rounding; `forward(x,
    y)`: [rows, 3, 8] and [rows, 1] → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(3, 4, 3), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return F.mse_loss(self.head(self.inner(x).relu().mean(-1) + x.tanh().mean(-1)), y)


@captures_of("centred")
def _centred(dtype: torch.dtype, pins: dict[str, Any] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Centred().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, dtype=dtype), torch.randn(8, 1, dtype=dtype)).backward()
        optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


def _centred_difference(dtype: torch.dtype) -> float:
    return furthest(_centred(dtype, {"data": 2}), _centred(dtype, None))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_mean_that_is_rounding_is_no_difference(
    pool: Pool, dtype: torch.dtype, bound: float
) -> None:
    assert max(pool.run(2, _centred_difference, dtype)) <= bound


def _planted(dtype: torch.dtype, size: float) -> tuple[str, ...]:
    """What is refused where the mean that is zero is off by `size`."""
    step = Session.step

    def moved(session: Session, *args: Any) -> Any:
        result = step(session, *args)
        session.model.get_buffer("inner.running_mean").add_(size)
        return result

    with patch.object(Session, "step", moved):
        try:
            _centred(dtype, {"data": 2})
        except PlanDiffers as error:
            return error.values
    return ()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_mean_that_is_more_than_rounding_is_found(
    pool: Pool, dtype: torch.dtype, size: float
) -> None:
    for values in pool.run(2, _planted, dtype, size):
        assert [v.split(":")[0] for v in values] == ["new value of `inner.running_mean`"]
