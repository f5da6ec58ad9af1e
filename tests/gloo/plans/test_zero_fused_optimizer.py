"""An optimizer whose kernel takes memory as one range steps shards that are a part of each row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import graphaccel
from tests.gloo.plans.test_first_update import WORDS, Words
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


class Flat(torch.optim.Optimizer):
    """A kernel of somebody else's, on memory as one range."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            flat = p.as_strided((p.numel(),), (1,))
            flat -= 0.1 * p.grad.as_strided((p.numel(),), (1,)).sign()


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "flat":
        return Flat(model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def _apart(kind: str, zero: int) -> float:
    torch.manual_seed(0)
    plain = Words().double()
    model = copy.deepcopy(plain)
    ours, theirs = _optimizer(kind, model), _optimizer(kind, plain)
    graphaccel.optimize(model, ours, data=2, zero=zero)
    for step in range(3):
        ids = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(step))
        for each, optimizer in ((model, ours), (plain, theirs)):
            each(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = graphaccel.full_state_dict(model)
    return max((weights[n] - w).abs().max().item() for n, w in plain.state_dict().items())


@pytest.mark.parametrize("kind", ["fused", "flat"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_three_steps_are_those_of_one_device(pool: Pool, zero: int, kind: str) -> None:
    assert max(pool.run(2, _apart, kind, zero)) < 1e-12
