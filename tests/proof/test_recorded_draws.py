"""A graph that draws as a training step does, and eager code that is given its draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphaccel
from graphaccel.errors import CaptureDiffers
from graphaccel.proof import comparison
from graphaccel.proof.comparison import Pair, pair_of
from graphaccel.proof.evidence import Proof
from graphaccel.proof.first_step import prove
from tests.proof.models import batch, captured, seeded

ROWS = batch(targets=False, rows=2)
"""As few rows as are compared: a training step has no more."""


class Drawing(nn.Module):
    """Dropout of elements and of channels, in a checkpoint too, and uniform and normal noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.noise = nn.Linear(5, 8), nn.Dropout(0.3), 1.0
        self.first: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.first()
        x = self.drop(self.linear(x)) + self.noise * torch.rand_like(self.linear(x))
        x = x + torch.randn(8)
        x = checkpoint(lambda h: F.dropout(h, 0.5).square(), x, use_reentrant=False)
        return F.dropout1d(x.unflatten(1, (4, 2)), 0.2).square().mean()


@pytest.fixture(scope="module")
def drawing() -> tuple:
    return captured(seeded(Drawing), ROWS)


def pair(drawing: tuple, change: Any = lambda model: None) -> Pair:
    model = seeded(Drawing)
    change(model)
    return pair_of(model, None, drawing[0], ROWS, drawing[1])


def count_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each run of a captured graph."""
    runs: list[int] = []
    run = comparison.run_graph
    monkeypatch.setattr(comparison, "run_graph", lambda *a: (runs.append(1), run(*a))[1])
    return runs


def test_eager_code_is_given_the_draws_of_a_step(
    drawing: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = count_graphs(monkeypatch)
    made = prove(pair(drawing))
    assert made.proved, made.text
    assert made.error < 1e-6
    assert made.graph is not None
    assert len(runs) == 1


def test_the_graph_runs_once_before_a_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = count_graphs(monkeypatch)
    model = seeded(Drawing)
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    model(ROWS.leaves[0]).backward()
    assert len(runs) == 1


@pytest.mark.parametrize("what", ["probability", "scale"])
def test_another_distribution_is_a_difference(drawing: tuple, what: str) -> None:
    def change(model: Any) -> None:
        if what == "probability":
            model.drop.p = 0.6
        else:
            model.noise = 1.5

    with pytest.raises(CaptureDiffers):
        prove(pair(drawing, change))


def test_other_draws_are_compared_without_those_of_a_step(drawing: tuple) -> None:
    def change(model: Any) -> None:
        model.first = lambda: torch.rand(3)  # one that no graph needs

    made = prove(pair(drawing, change))
    assert isinstance(made, Proof)
    assert made.proved
    assert made.text.endswith("draws matched by shape")
    assert made.graph is None
