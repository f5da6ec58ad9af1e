"""A loss of a rounded part of the rows, as of the hardest examples: planned, and equal to eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, plans_of_two, weights

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("tensor", "pipeline")
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda losses: losses.topk(int(0.5 * len(losses))).values.mean(),
    "a third": lambda losses: losses.sort().values[: int(len(losses) / 3)].sum(),
    "threes": lambda losses: losses.sort().values[: len(losses) - len(losses) % 3].sum(),
}


class Hardest(nn.Module):
    """`forward(x [B, 8], y [B, 8])` → loss of a part of the rows."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.first, self.last, self.part = nn.Linear(8, 16), nn.Linear(16, 8), part

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.last(torch.tanh(self.first(x)))
        return PARTS[self.part](F.mse_loss(output, y, reduction="none").mean(1))


def _trained(wrap: Wrap, part: str) -> Iterator[Tensor]:
    model = Hardest(part).double()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*torch.randn(2, 8, 8).double())
        loss.backward()
        optimizer.step()
        yield loss
    yield from weights(model)


def _difference(part: str, plan: str) -> float:
    return furthest(lambda wrap: _trained(wrap, part), PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("part", PARTS)
def test_as_eager_mode(pool: Pool, part: str, plan: str) -> None:
    assert max(pool.run(2, _difference, part, plan)) < 1e-12
