"""Branches on the value of a small buffer: a step is captured for the value that it has now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.inside import captures_in
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, weights

pytestmark = pytest.mark.multiprocess

ASKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda flag: flag.item() == 0,
    "truth": lambda flag: not flag,
    "compared": lambda flag: (flag == 0).all(),
    "a number": lambda flag: int(flag) < 1,
    "behind a norm": lambda flag: (flag.float().norm(), flag.item() == 0)[1],
    "a copy": lambda flag: not bool(flag.clone().sum() > 0),
}


class Centred(nn.Module):
    """Subtracts the mean of the first batch, which it keeps. Inputs [B, 6]."""

    def __init__(self, ask: str) -> None:
        super().__init__()
        self.initialized: Tensor
        self.mean: Tensor
        self.ask = ask
        self.register_buffer("initialized", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if ASKS[self.ask](self.initialized):
            self.mean.copy_(x.detach().mean(0))
            self.initialized.fill_(1)
        return x - self.mean


class Net(nn.Module):
    """`forward(x [B, 6], y [B, 6])` → loss, through blocks of which each keeps a mean."""

    def __init__(self, ask: str, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), Centred(ask)) for _ in range(blocks)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.mse_loss(x, y)


def _trained(wrap: Wrap, ask: str, blocks: int, *, first: bool) -> Iterator[Tensor]:
    """first: a forward before `optimize` sets the means. The script clears one flag later."""
    model: Any = Net(ask, blocks).double()
    if blocks > 2:
        model.blocks[-1][1].initialized.fill_(1)  # equal layers with unequal flags
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first:
        model(*torch.randn(2, 4, 6).double())
    model, optimizer = wrap(model, optimizer)
    for step in range(4):
        if step == 2 and not first:
            model.blocks[0][1].initialized.zero_()
        loss = model(*torch.randn(2, 4, 6).double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    model.eval()
    with torch.no_grad():
        yield model(*torch.randn(2, 4, 6).double())
    yield from weights(model)


def _furthest(ask: str, blocks: int, first: bool, pins: dict[str, Any]) -> float:
    return furthest(lambda wrap: _trained(wrap, ask, blocks, first=first), pins)


@pytest.mark.parametrize("ask", ASKS)
def test_one_process(ask: str) -> None:
    assert _furthest(ask, 1, False, {"devices": 1}) < 1e-12


def test_each_of_many_layers() -> None:
    assert _furthest("item", 10, False, {"devices": 1}) < 1e-12


@pytest.mark.parametrize("pins", [{"data": 2}, {"data": 2, "zero": 3}])
def test_two_processes(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _furthest, "item", 2, False, pins)) < 1e-12


def test_a_pipeline_where_the_flag_is_set_before(pool: Pool) -> None:
    pins = {"pipeline": 2, "microbatches": 2}
    assert max(pool.run(2, _furthest, "item", 2, True, pins)) < 1e-12


def _refused() -> str:
    model: Any = graphaccel.optimize(Net("item", 2), pipeline=2, microbatches=1)
    try:
        model(*torch.randn(2, 4, 6))
    except errors.Unsupported as error:
        return str(error)
    return ""


def test_a_pipeline_whose_stage_sets_the_flag(pool: Pool) -> None:
    for text in pool.run(2, _refused):
        assert "a branch on the buffer `blocks.0.1.initialized`" in text
        assert "model(batch)" in text


def test_a_flag_that_is_set_is_looked_at_no_more() -> None:
    model: Any = graphaccel.optimize(Net("item", 1), devices=1)
    for _ in range(4):
        model(*torch.randn(2, 4, 6)).backward()
    assert len(captures_in(model).steps) == 2


class Counts(nn.Module):
    """Doubles its result in the first steps. Inputs [B, 6] twice."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        twice = self.count.item() < 2
        self.count.add_(1)
        return F.mse_loss(self.layer(x) * (2 if twice else 1), y)


def test_a_count_is_refused_and_changes_nothing_more() -> None:
    model: Any = graphaccel.optimize(Counts(), devices=1)
    for _ in range(3):
        model(*torch.randn(2, 4, 6)).backward()
    with pytest.raises(errors.StateFrozen, match="the value of the buffer `count`, which has"):
        model(*torch.randn(2, 4, 6))
    assert model.count == 3
