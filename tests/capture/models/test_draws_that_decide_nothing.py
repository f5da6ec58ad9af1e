"""Draws from Python's and NumPy's generators whose value reaches neither the graph nor a branch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors


class Dropped(nn.Module):
    """A layer that is left out with a probability, as LayerDrop writes it. Inputs [B, 4] twice."""

    def __init__(self, draw: Callable[[], Any], layerdrop: float) -> None:
        super().__init__()
        self.draw, self.layerdrop = draw, layerdrop
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            probability = self.draw()
            if self.training and (probability < self.layerdrop):
                continue
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


DRAWS: dict[str, Callable[[], Any]] = {
    "random": lambda: random.random(),
    "uniform": lambda: random.uniform(0, 1),
    "numpy": lambda: np.random.uniform(0, 1),
    "rand": lambda: np.random.rand(),
}
USES: dict[str, Callable[[], Any]] = {
    "scaled": lambda: random.random() * 0.0,
    "rounded": lambda: int(random.random()),
    "chosen": lambda: random.choice([1.0, 2.0]),
    "several": lambda: float(np.random.rand(2)[0]),
}


def _stepped(model: nn.Module) -> list[Tensor]:
    x, y = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(x, y)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_layer_that_is_never_left_out(draw: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Dropped(DRAWS[draw], 0.0).double()
    model = copy.deepcopy(plain)
    graphaccel.optimize(model, devices=1)
    state = random.getstate()
    found = _stepped(model)
    assert random.getstate() == state  # a script's own draws are those without graphaccel's tries
    for one, other in zip(_stepped(plain), found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
    assert "that decide nothing, test_draws_that_decide_nothing.py:" in capsys.readouterr().err


@pytest.mark.parametrize("draw", DRAWS)
def test_a_layer_that_is_left_out_at_times(draw: str) -> None:
    model = graphaccel.optimize(Dropped(DRAWS[draw], 0.5), devices=1)
    with pytest.raises(errors.DrawnOutside):
        _stepped(model)


@pytest.mark.parametrize("use", USES)
def test_a_value_that_is_used(use: str) -> None:
    model = graphaccel.optimize(Dropped(USES[use], 0.0), devices=1)
    with pytest.raises(errors.DrawnOutside):
        _stepped(model)


def test_a_probability_that_is_raised_between_steps() -> None:
    model: Any = graphaccel.optimize(Dropped(DRAWS["random"], 0.0).double(), devices=1)
    _stepped(model)
    model.layerdrop = 0.9
    with pytest.raises(errors.DrawnOutside):
        _stepped(model)


class Kept(Dropped):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.last = self.draw()
        return super().forward(x, y)


def test_a_value_that_is_left_for_the_script() -> None:
    model = graphaccel.optimize(Kept(DRAWS["random"], 0.0), devices=1)
    with pytest.raises(errors.DrawnOutside):
        _stepped(model)
