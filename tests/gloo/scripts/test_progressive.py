"""Models that grow, and functions that are replaced, between steps: equal to plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from graphaccel.errors import GraphAccelError
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, plans_of_two, weights

pytestmark = pytest.mark.multiprocess
PLANS = plans_of_two("zero3", "pipeline")


class Grown(nn.Module):
    """As many of its layers run as the script says, the last one faded in. Inputs [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.depth, self.share, self.activation = 1, 1.0, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for i, layer in enumerate(self.layers[: self.depth]):
            new = self.activation(layer(h))
            h = self.share * new + (1 - self.share) * h if i == self.depth - 1 else new
        return self.last(h).square().mean()


def _run(wrap: Wrap, depths: list[int]) -> Iterator[Tensor]:
    model = Grown().double()
    model, optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(0)
    for step, depth in enumerate(depths):
        model.depth, model.share = depth, 0.5 + 0.1 * step
        if step == 2:
            model.activation = lambda h: h**3
        loss = model(torch.randn(4, 4, generator=generator).double())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield from weights(model)


def grown(wrap: Wrap) -> Iterator[Tensor]:
    return _run(wrap, [1, 1, 2, 2, 3])


def shortened(wrap: Wrap) -> Iterator[Tensor]:
    return _run(wrap, [3, 3, 2, 2, 1])


def test_layers_that_come_later(pool: Pool) -> None:
    assert max(pool.run(2, furthest, grown, PLANS["zero3"])) < 1e-12


@pytest.mark.parametrize("plan", PLANS)
def test_layers_that_leave(pool: Pool, plan: str) -> None:
    assert max(pool.run(2, furthest, shortened, PLANS[plan])) < 1e-12


def _refused() -> str:
    try:
        furthest(grown, PLANS["pipeline"])
    except GraphAccelError as error:
        return str(error)
    return ""


def test_layers_without_a_stage_are_refused_on_every_rank(pool: Pool) -> None:
    for text in pool.run(2, _refused):
        assert text.startswith("error[GA208]: a step that reads `layers.1.")
        assert "on stage 1 of the pipeline is not supported" in text
