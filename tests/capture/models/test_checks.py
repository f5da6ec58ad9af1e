"""Checks of values that a forward makes: an `if` that does nothing but raise is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.steps import WIDTH, assert_as_eager


class Checks(nn.Module):
    """`forward(x, y)` → loss, after checks that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layer(x)
        for each in (x, hidden):
            if torch.isnan(each).any():
                raise ValueError("no number")
        if not torch.isfinite(hidden).all():
            raise ValueError(f"infinite: {hidden.sum()} of {tuple(hidden.shape)}")
        if x.max() > 1e6 or x.min() < -1e6:
            raise IndexError("out of range: " + str(x.max()))
        if self.training and hidden.abs().max().item() > 1e6:
            raise RuntimeError
        if torch.isfinite(y).all():
            hidden = torch.tanh(hidden)
        else:
            raise ValueError("no label")
        return F.mse_loss(hidden, y)


class Counts(Checks):
    """Counts its calls, too, and reads that."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y) / self.calls


class Chooses(Checks):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if torch.isfinite(x).all():
            y = y + 1
        return super().forward(x, y)


def test_checks_are_left_out() -> None:
    assert_as_eager(Checks)


@pytest.mark.parametrize(("kind", "code"), [(Counts, "GA106"), (Chooses, "GA101")])
def test_what_stays_refused(kind: type[nn.Module], code: str) -> None:
    model = graphaccel.optimize(kind(), devices=1)
    with pytest.raises(errors.GraphAccelError, match=code):
        model(*torch.randn(2, 4, WIDTH))
