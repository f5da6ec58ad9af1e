"""Weights computed from others: a gradient that goes through an op without parts of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import graphaccel
from graphaccel.errors import SplitRefused


class Parametrized(nn.Module):
    """A layer whose weight is made orthogonal, or has its norm apart."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = getattr(parametrizations, kind)(nn.Linear(8, 8))

    def forward(self, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.first(rows).tanh()), wanted)


def step(kind: str, **pins: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Parametrized(kind).double()
    rows, wanted = torch.randn(2, 8, 8).double()
    if pins:
        graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1, **pins)
    model(rows, wanted).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_norm_apart_is_exact() -> None:
    torch.testing.assert_close(step("weight_norm", microbatches=2), step("weight_norm"))


def test_an_orthogonal_weight_needs_the_gradient_of_the_whole_batch() -> None:
    """A matrix exponential is not linear: its backward takes no part of a gradient."""
    with pytest.raises(SplitRefused) as caught:
        step("orthogonal", microbatches=2)
    text = str(caught.value)
    assert "aten.linalg_matrix_exp.default in `last.parametrizations.weight.0`" in text
    assert "why:  in the backward it needs the gradient of the whole batch" in text
    assert "help: keep the batch whole on this axis:  microbatches=1" in text
    torch.testing.assert_close(step("orthogonal", data=1), step("orthogonal"))
