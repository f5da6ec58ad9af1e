"""Buffers that a step writes: where one stage makes the new value and others read or hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import graphaccel
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline": 2, "microbatches": 1},
    "interleaved": {"pipeline": 2, "interleave": 2, "microbatches": 1},
    "zero 3": {"data": 2, "zero": 3},
}


class Spectral(nn.Module):
    """The last weight's power iteration reads one of its two buffers only. Inputs [B, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = spectral_norm(nn.Linear(6, 16)), spectral_norm(nn.Linear(16, 6))
        self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for layer in self.middle:
            h = torch.tanh(layer(h))
        return self.last(h).square().mean()


class Again(nn.Module):
    """A weight with power iterations at both ends, so on two stages. Inputs [B, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shared = nn.Linear(6, 16), spectral_norm(nn.Linear(16, 16))
        self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.shared(self.inner(x)))
        for layer in self.middle:
            h = torch.tanh(layer(h))
        return self.shared(h).square().mean()


class Statistics(nn.Module):
    """A batch norm that is called early and late. Inputs [B, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.inner(x)))
        for layer in self.middle:
            h = torch.tanh(layer(h))
        return (self.norm(h) + h).square().mean()


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6, generator=generator).double())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@captures_of("buffers in stages")
def _differences(make: Callable[[], nn.Module], pins: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    plain = make().double()
    planned = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.3)
    graphaccel.optimize(planned, optimizer, devices=2, **pins)
    wanted = _losses(plain, torch.optim.SGD(plain.parameters(), lr=0.3))
    got = _losses(planned, optimizer)
    state = graphaccel.full_state_dict(planned)
    found = {n: (state[n] - t).abs().max().item() for n, t in plain.state_dict().items()}
    return {**found, "loss": max(abs(a - b) for a, b in zip(wanted, got, strict=True))}


CASES = [(plan, make) for plan in ("pipeline", "zero 3") for make in (Spectral, Again, Statistics)]


@pytest.mark.parametrize(("plan", "make"), [*CASES, ("interleaved", Again)])
def test_buffers_are_those_of_one_device(
    pool: Pool, plan: str, make: Callable[[], nn.Module]
) -> None:
    for found in pool.run(2, _differences, make, PLANS[plan]):
        wrong = {name: error for name, error in found.items() if not error <= 1e-12}
        assert not wrong
