"""Numbers that a script gives the model in its call, another one in each step: equal to plain
PyTorch in float64, and inputs of the graph where arithmetic alone reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, plans_of_two, weights

PLANS = plans_of_two("zero3", "pipeline")
STEPS = 10


class Mixed(nn.Module):
    """A share that arithmetic reads, and a number of columns. Inputs [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, share: float = 1.0, *, step: int = 0, columns: int = 4) -> Tensor:
        h = self.last(torch.tanh(self.first(share * x + (1 - share) * x.flip(0))))
        return h[:, :columns].square().mean() / (1 + step)


def _run(wrap: Wrap, numbers: list[dict[str, Any]], *, seen: bool = True) -> Iterator[Tensor]:
    model = Mixed().double()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(0)
    for given in numbers:
        x = torch.randn(4, 4, generator=generator).double()
        loss = model(x, **given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
        if seen:
            with torch.no_grad():
                yield model(x, **given)
    yield from weights(model)


def inputs(wrap: Wrap) -> Iterator[Tensor]:
    return _run(wrap, [{"share": 1 - 0.1 * i, "step": i} for i in range(STEPS)])


def sizes(wrap: Wrap) -> Iterator[Tensor]:
    return _run(wrap, [{"step": i, "columns": 1 + i % 4} for i in range(STEPS)])


@pytest.mark.multiprocess
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("script", [inputs, sizes])
def test_numbers_in_calls(pool: Pool, plan: str, script: Any) -> None:
    assert max(pool.run(2, furthest, script, PLANS[plan])) < 1e-12


@pytest.mark.parametrize("early", [True, False])
def test_one_capture_for_all_values(early: bool) -> None:
    models = []

    def wrap(model: nn.Module, optimizer: Any) -> Any:
        example = (torch.zeros(4, 4, dtype=torch.float64), 0.5) if early else None
        models.append(model)
        return graphaccel.optimize(model, optimizer, devices=1, example_batch=example)

    rates = [{"share": 1 - 0.1 * i, "step": 0} for i in range(STEPS)]
    list(_run(wrap, [{"share": r["share"]} for r in rates] if early else rates, seen=False))
    assert len(models[0].graphaccel.compiler.captures.steps) == 2
