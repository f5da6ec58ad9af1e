"""Parameters that a script replaces between steps, rather than writing into them."""

from __future__ import annotations

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


def _viewed() -> str:
    """A buffer that is a view of a parameter."""
    model = _model()
    model.shift = model.second.bias.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        batch = torch.randn(8, 16)
        graphaccel.optimize(model, optimizer, devices=2, zero=3, example_batch=batch)
    except Unsupported as error:
        return str(error)
    return ""


VIEWED = """\
error[GA208]: the buffer `shift`, a view of the parameter `second.bias`, is not supported
  why:  the plan shards the parameter, whose updates a view would not see
  help: read the parameter itself in forward:  self.second.bias
  help: or keep parameters whole:  zero=0, tensor=1
  explain: graphaccel explain GA208"""


def test_shards_that_would_be_read_under_another_name(pool: Pool) -> None:
    for text in pool.run(2, _reordered):
        assert text.splitlines()[0] == (
            "error[GA407]: `0.weight` was replaced, and this rank held only a part of it or none"
        )
    assert pool.run(2, _viewed) == [VIEWED] * 2


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
