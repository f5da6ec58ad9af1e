"""Parameters that a script replaces between steps, rather than writing into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.errors import GraphMisuse, Unsupported
from tests.support.pool import Pool

WAYS = ("data", "assign", "copy")


class Model(nn.Module):
    """Two layers and a loss. Inputs [B, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.second(torch.tanh(self.first(x))) + self.shift) ** 2).mean()


def _model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def _replace(model: nn.Module, way: str) -> None:
    new = {name: 2 * value for name, value in _model().state_dict().items()}
    if way == "data":
        for name, parameter in model.named_parameters():
            parameter.data = new[name]
        model.shift = new["shift"]
    else:
        model.load_state_dict(new, assign=way == "assign")


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> list[float]:
    x, losses = torch.linspace(-1, 1, 8 * 16).view(8, 16), []
    for step in range(4):
        if step == 2:
            _replace(model, way)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _reordered() -> str:
    """Layers in another order, which are other parameters under the same names."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, loss_fn=F.mse_loss, devices=2, zero=3, check="off")
    x = torch.randn(8, 16)
    model(x, x).backward()
    model[0], model[2] = model[2], model[0]
    try:
        model(x, x)
    except GraphMisuse as error:
        return str(error)
    return ""


def _viewed(what: str, pins: Mapping[str, Any]) -> str:
    """A buffer or a parameter that is a view of a parameter."""
    model = _model()
    if what == "buffer":
        model.shift = model.second.bias.data
    else:
        model.second.weight = nn.Parameter(model.first.weight.detach().t())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        batch = torch.randn(8, 16)
        graphaccel.optimize(model, optimizer, devices=2, example_batch=batch, **pins)
    except Unsupported as error:
        return str(error)
    return ""


VIEWED = {
    "buffer": """\
error[GA208]: the buffer `shift`, a view of the parameter `second.bias`, is not supported
  why:  the plan moves the parameter, whose updates a view would not see
  help: read the parameter itself in forward:  self.second.bias
  help: or keep parameters whole on each device:  zero=0, tensor=1, pipeline=1
  explain: graphaccel explain GA208""",
    "parameter": """\
error[GA208]: the parameter `second.weight`, a view of the parameter `first.weight`, is not supported
  why:  the plan moves them, and an update of one would not be seen by the other
  help: have one parameter, and read it in both places:  torch.nn.functional.linear(x, self.first.weight.t())
  help: or keep parameters whole on each device:  zero=0, tensor=1, pipeline=1
  explain: graphaccel explain GA208""",  # noqa: E501
}
MOVED: tuple[dict[str, Any], ...] = ({"zero": 3}, {"pipeline": 2})


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", VIEWED)
def test_views_of_what_the_plan_moves_are_refused(pool: Pool, what: str) -> None:
    for pins in MOVED:
        assert pool.run(2, _viewed, what, pins) == [VIEWED[what]] * 2


def _tied_by_memory(pins: Mapping[str, Any]) -> float:
    """Largest difference to plain weights after three steps of a model whose second weight is a
    view of its first."""
    states = []
    for planned in (False, True):
        model = _model().double()
        model.second.weight = nn.Parameter(model.first.weight.detach().t())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if planned:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.linspace(-1, step, 8 * 16, dtype=torch.float64).view(8, 16)).backward()
            optimizer.step()
        states.append(graphaccel.full_state_dict(model))
    return max(float((value - states[1][name]).abs().max()) for name, value in states[0].items())


@pytest.mark.multiprocess
def test_views_of_what_stays_are_trained_as_on_one_device(pool: Pool) -> None:
    assert max(pool.run(2, _tied_by_memory, {"data": 2})) < 1e-12


def test_shards_that_would_be_read_under_another_name(pool: Pool) -> None:
    for text in pool.run(2, _reordered):
        assert text.splitlines()[0] == (
            "error[GA407]: `0.weight` was replaced, and this rank held only a part of it or none"
        )


@pytest.mark.parametrize("way", WAYS)
def test_the_step_goes_on_with_what_is_there(way: str) -> None:
    eager = _model()
    wanted = _losses(eager, torch.optim.SGD(eager.parameters(), lr=0.1), way)
    model = _model()
    model, optimizer = graphaccel.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1
    )
    assert _losses(model, optimizer, way) == pytest.approx(wanted, rel=1e-6)
    assert abs(wanted[2] - wanted[1]) > 0.1  # the old values would not do


def _in_shards(way: str) -> str:
    model = _model()
    model, optimizer = graphaccel.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data=2, pipeline=1, zero=3
    )
    try:
        return str(_losses(model, optimizer, way))
    except GraphMisuse as error:
        return str(error)


@pytest.mark.multiprocess
def test_what_lies_in_shards_is_not_replaced(pool: Pool) -> None:
    for said in pool.run(2, _in_shards, "assign"):
        assert said == (
            "error[GA407]: `first.weight` was replaced, and this rank held only a part of it or "
            "none\n"
            "  help: copy values into it:  model.load_state_dict(state)\n"
            "  explain: graphaccel explain GA407"
        )


class Masked(nn.Module):
    """A buffer in each of two layers. Inputs [B, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("inner", torch.ones(32))
        self.register_buffer("outer", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.inner
        return (self.second(hidden) * self.outer).square().mean()


def _masked(pins: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = Masked().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    losses = []
    for step in range(6):
        if step == 2:
            model.inner = torch.arange(32).double() / 32
            model.outer = torch.arange(16).double() / 16
        if step == 4:
            model.inner, model.outer = model.inner * 2, model.outer.square()
        loss = model(torch.linspace(-1, 1, 8 * 16).double().view(8, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PIPELINE = {"pipeline": 2, "microbatches": 2}


@pytest.mark.multiprocess
@pytest.mark.parametrize("pins", [PIPELINE, {"data": 2, "zero": 3}], ids=["pipeline", "data"])
def test_buffers_are_replaced_under_every_plan(pool: Pool, pins: dict[str, Any]) -> None:
    eager = _masked(None)
    assert abs(eager[2] - eager[1]) > 0.01
    for found in pool.run(2, _masked, pins):
        assert found == pytest.approx(eager, rel=1e-12)
