"""Averages of a model that is trained under a plan (EMA, SWA) are those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import graphaccel
from graphaccel.errors import ElsewhereNeeded
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 2, "zero": 2},
    "zero 3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}


class Net(nn.Module):
    """Inputs [B, 6]; sizes that two ranks divide, and some that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.norm(self.up(x))) * self.scale).square().mean()


def _averages(model: nn.Module) -> list[AveragedModel]:
    ema, swa = get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn()
    return [
        AveragedModel(model, multi_avg_fn=ema, use_buffers=True),
        AveragedModel(model, multi_avg_fn=swa),
        AveragedModel(model, avg_fn=lambda mean, new, _count: 0.5 * mean + 0.5 * new),
    ]


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, averages: list[AveragedModel]
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator).double()).backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)


@captures_of("averages")
def _differences(pins: dict[str, Any], when: str) -> list[float]:
    torch.manual_seed(0)
    plain = Net().double()
    planned = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    wanted = _averages(plain)
    _trained(plain, optimizer, wanted)

    optimizer, got = torch.optim.SGD(planned.parameters(), lr=0.3), _averages(planned)
    batch = (torch.randn(8, 6).double(),)
    graphaccel.optimize(planned, optimizer, devices=2, example_batch=batch, **pins)
    if when == "after":
        got = _averages(planned)
    _trained(planned, optimizer, got)
    differences = []
    for a, b in zip(wanted, got, strict=True):
        state = graphaccel.full_state_dict(b)
        assert set(state) == set(a.state_dict())
        differences += [(state[n] - t).abs().max().item() for n, t in a.state_dict().items()]
    own = graphaccel.full_state_dict(planned)
    assert not torch.equal(own["up.weight"], graphaccel.full_state_dict(got[0])["module.up.weight"])
    return differences


CASES = [(plan, when) for plan in PLANS for when in ("before", "after")]
CASES.remove(("pipeline", "before"))  # refused


@pytest.mark.parametrize(("plan", "when"), CASES)
def test_averages_are_those_of_one_device(pool: Pool, plan: str, when: str) -> None:
    for differences in pool.run(2, _differences, PLANS[plan], when):
        assert max(differences) <= 1e-14


@captures_of("averages")
def _refused() -> str:
    model = Net().double()
    average = AveragedModel(model)
    batch = (torch.randn(8, 6).double(),)
    graphaccel.optimize(model, devices=2, example_batch=batch, **PLANS["pipeline"])
    with pytest.raises(ElsewhereNeeded) as caught:
        average.update_parameters(model)
    return str(caught.value)


def test_a_whole_average_of_a_model_in_stages_is_refused(pool: Pool) -> None:
    for text in pool.run(2, _refused):
        first, where, line, *_ = text.splitlines()
        wanted = "`copy` needs the values of a parameter that is on another pipeline rank"
        assert first == f"error[GA408]: {wanted}"
        assert "test_averages.py" in where
        assert "average.update_parameters(model)" in line
