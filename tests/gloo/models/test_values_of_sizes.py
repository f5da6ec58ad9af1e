"""Branches on values that no input decides: masks made of ones, and sizes computed as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, weights

pytestmark = pytest.mark.multiprocess

WIDTH = 6


def _local(x: Tensor) -> Tensor:
    """As Longformer: a mask of local positions, in which no position is global."""
    mask = F.pad(torch.ones(x.shape[:2], device=x.device), (0, 2)).clamp(0, 1)
    mask = torch.where(mask.to(torch.bool)[:, None, None, :], torch.zeros(()), -9.0)[:, 0, 0]
    mask[mask == 2] = 9.0
    if (mask > 0).flatten().any().item():
        return x * 3
    return x + (mask < 0).sum()


def _halves(x: Tensor) -> Tensor:
    """A size that is computed as a tensor, as Longformer's chunks."""
    half: Any = torch.div(x.shape[1], 2, rounding_mode="trunc")
    pairs = x.view(len(x), half, 2, WIDTH)
    sums = x.new_zeros((len(x), half + 1, WIDTH))
    sums[:, :half] = pairs.sum(2)
    return x + sums.mean(1, keepdim=True)


def _every_row(x: Tensor) -> Tensor:
    """As X-MOD: rows are chosen by a language that all of them have."""
    languages = 1 * torch.ones(len(x))
    result = torch.zeros_like(x)
    result[languages == 1] = torch.tanh(x[languages == 1])
    return result


def _written(x: Tensor) -> Tensor:
    """Asks between writes in place, also through a view."""
    steps = torch.zeros(4)
    steps += torch.arange(4)
    x = x * float(steps.sum()) if steps.max() == 3 else x * x
    steps[1:].fill_(0)
    return x + 1


def _counted(x: Tensor) -> Tensor:
    """A loop until a number that is a tensor is reached."""
    left = torch.tensor(2)
    while left > 0:
        x, left = torch.sin(x), left - 1
    return x


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": _local,
    "a size": _halves,
    "every row": _every_row,
    "written": _written,
    "counted": _counted,
}


def _drawn(x: Tensor) -> Tensor:
    return x * 2 if torch.zeros(3).bernoulli_(0.5).any() else x


def _drawn_beside(x: Tensor) -> Tensor:
    return x * 2 if (torch.rand(3) + torch.ones(3)).sum() > 4 else x


def _of_the_batch(x: Tensor) -> Tensor:
    mask = torch.zeros(2)
    mask[0] = x.sum()
    return x * 2 if mask.any() else x


def _behind_a_view(x: Tensor) -> Tensor:
    mask = torch.zeros(2, WIDTH, dtype=x.dtype)
    mask[0].copy_(x[0, 0])
    return x * 2 if mask.any() else x


def _below_a_view(x: Tensor) -> Tensor:
    mask = torch.zeros(2, WIDTH, dtype=x.dtype)
    row = mask[0]
    mask.copy_(x[0, :2])
    return x * 2 if row.any() else x


class Net(nn.Module):
    """`forward(x [B, 4, 6], y)` → loss."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.after(self.between(torch.tanh(self.before(x)))), y)


def _trained(wrap: Wrap, name: str) -> Iterator[Tensor]:
    model: Any = Net(KNOWN[name]).double()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in (4, 4, 8):
        loss = model(*torch.randn(2, rows, 4, WIDTH).double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    yield from weights(model)


def _furthest(name: str, pins: dict[str, Any]) -> float:
    return furthest(lambda wrap: _trained(wrap, name), pins)


@pytest.mark.parametrize("name", KNOWN)
def test_one_process(name: str) -> None:
    assert _furthest(name, {"devices": 1}) < 1e-12


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": 2, "microbatches": 2}], ids=str)
def test_two_processes(pool: Pool, name: str, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _furthest, name, pins)) < 1e-12


@pytest.mark.parametrize(
    "between", [_drawn, _drawn_beside, _of_the_batch, _behind_a_view, _below_a_view]
)
def test_what_an_input_or_a_draw_decides_is_refused(between: Callable[[Tensor], Tensor]) -> None:
    model: Any = graphaccel.optimize(Net(between).double(), devices=1)
    with pytest.raises(errors.TensorBranch):
        model(*torch.randn(2, 4, 4, WIDTH).double())
