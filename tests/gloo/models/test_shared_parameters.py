"""Parameters that are used several times, within a stage and across stages, under every schedule.

The cuts vary: what a stage does with a use of a parameter depends on which other uses are there.

One model has every way of sharing: a norm used early, in the middle and late, a layer used twice in
a row and once more at the end, an embedding that is the output's weight, two biases whose gradients
are one value, and one bias that is added twice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.runtime.parameters.sharded import ShardTensor
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

WIDTH, WORDS = 16, 24
APART = {"pipeline": 2, "microbatches": 4}
CUTS = ("add_1", "layer_norm", "layer_norm_1", "layer_norm_3")
PLANS: dict[str, list[dict[str, Any]]] = {
    "gpipe": [{**APART, "schedule": "gpipe", "cuts": (cut,)} for cut in CUTS],
    "1f1b": [{**APART, "schedule": "1f1b", "cuts": (cut,)} for cut in CUTS],
    "interleaved": [
        {**APART, "schedule": "interleaved", "interleave": 2, "cuts": CUTS[:3]},
        {**APART, "schedule": "interleaved", "interleave": 2, "cuts": CUTS[1:]},
    ],
    "zero bubble": [{**APART, "schedule": "zero_bubble", "cuts": (cut,)} for cut in CUTS],
    "zero bubble, 2 microbatches": [
        {**APART, "schedule": "zero_bubble", "cuts": (cut,), "microbatches": 2} for cut in CUTS
    ],
    "zero bubble, recomputed": [
        {**APART, "schedule": "zero_bubble", "cuts": CUTS[:1], "recompute": "all"}
    ],
    "chosen": [APART],
    "data": [{"data": 2}, {"data": 2, "microbatches": 2}],
    "zero": [
        {"data": 2, "zero": 1, "microbatches": 2},
        {"data": 2, "zero": 2},
        {"data": 2, "zero": 2, "microbatches": 2, "bucket_bytes": 256},
        {"data": 2, "zero": 3, "microbatches": 2},
    ],
    "tensor": [{"tensor": 2}],
}


class Shared(nn.Module):
    """`forward(ids)`: [B, 6] tokens → a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.one, self.other, self.twice = (nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.words(ids) + self.one + self.other)
        h = self.layer(torch.tanh(self.layer(h)))
        for block in self.blocks:
            h = self.norm(h + torch.tanh(block(h))) + self.twice + self.twice
        logits = self.head(self.layer(self.norm(h)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _model() -> Shared:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Shared().double()


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    ids = torch.randint(0, WORDS, (8, 6), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@captures_of("shared parameters")
def _differences(plans: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [_difference(pins) for pins in plans]


def _difference(pins: Mapping[str, Any]) -> dict[str, float]:
    plain = _model()
    planned = copy.deepcopy(plain)
    wanted = _trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    graphaccel.optimize(planned, optimizer, devices=2, **pins)
    got = _trained(planned, optimizer)
    state = graphaccel.full_state_dict(planned)
    found = {n: (state[n] - value).abs().max().item() for n, value in plain.state_dict().items()}
    return {**found, "loss": max(abs(a - b) for a, b in zip(wanted, got, strict=True))}


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_shared_parameters_are_those_of_one_device(pool: Pool, plan: str) -> None:
    for results in pool.run(2, _differences, PLANS[plan]):
        for pins, found in zip(PLANS[plan], results, strict=True):
            wrong = {name: error for name, error in found.items() if not error <= 1e-12}
            assert not wrong, pins


class Summed(nn.Module):
    """Two weights that have one value for a gradient. Inputs [B, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.a + self.b)).square().mean()


@captures_of("shared parameters")
def _one_value(zero: int) -> float:
    torch.manual_seed(0)
    plain, x = Summed().double(), torch.randn(8, WIDTH).double()
    planned = copy.deepcopy(plain)
    graphaccel.optimize(planned, torch.optim.SGD(planned.parameters()), data=2, zero=zero)
    plain(x).backward()
    planned(x).backward()
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    return max((_whole(mine.grad) - true.grad).abs().max().item() for true, mine in pairs)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.whole() if isinstance(gradient, ShardTensor) else gradient


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_weights_with_one_value_for_a_gradient(pool: Pool, zero: int) -> None:
    assert max(pool.run(2, _one_value, zero)) <= 1e-14
