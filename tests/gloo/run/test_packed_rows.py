"""Packed rows on several processes: losses and updates of the examples one by one, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.data.collate import PackingCollator
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero 3": {"data": 2, "zero": 3},
    "pipeline": {"pipeline": 2, "microbatches": 2},
    "tensor": {"tensor": 2},
    "zero 3 and pipeline": {"data": 2, "zero": 3, "pipeline": 2, "microbatches": 2},
}
STEPS = 2
LENGTHS = ((15, 9, 6, 5), (16, 3, 7))
"""Of the examples of each step, in four rows of 16: ranks and microbatches have different numbers
of tokens, and in the second step one of them has none."""


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.inputs(x).view(*x.shape[:2], 6, 8).transpose(1, 2).chunk(3, dim=1)
        heads = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        return x + self.output(heads.transpose(1, 2).reshape(x.shape))


class _Language(nn.Module):
    """Positions from a table, two blocks of attention, and the mean loss over what is labelled."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(_Attention() for _ in range(2))
        self.head = nn.Linear(16, 40)

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 40), labels[:, 1:].reshape(-1))


def _examples(step: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(40, (n,), generator=generator).tolist() for n in LENGTHS[step]]


def _apart(model: nn.Module, examples: list[list[int]]) -> Tensor:
    """The mean loss over the tokens of examples that each run alone."""
    losses = []
    for ids in examples:
        tokens, places = torch.tensor([ids]), torch.arange(len(ids))
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        losses.append(model(tokens, tokens, places[None], mask[None, None]) * (len(ids) - 1))
    return torch.stack(losses).sum() / sum(len(ids) - 1 for ids in examples)


def _compare(pins: dict[str, Any]) -> None:
    collate = PackingCollator(length=16, rows=4)
    torch.manual_seed(0)
    plain = _Language().double()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, ours)]
    devices = pins.get("data", 1) * pins.get("pipeline", 1) * pins.get("tensor", 1)
    graphaccel.optimize(ours, optimizers[1], devices=devices, check="off", **pins)
    for step in range(STEPS):
        loss = ours(**collate(_examples(step)))
        expected = _apart(plain, _examples(step))
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-11, atol=0)
        for each, optimizer in ((loss, optimizers[1]), (expected, optimizers[0])):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = graphaccel.full_state_dict(ours)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("plan", PLANS)
def test_as_the_examples_one_by_one(pool: Pool, plan: str) -> None:
    pool.run(4 if "and" in plan else 2, _compare, PLANS[plan])
