"""Frozen parameters that the forward updates (a teacher that follows its student)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

import graphaccel
from graphaccel.errors import CaptureRefused
from tests.support.steps import WIDTH, assert_as_eager, batch_of


class Taught(nn.Module):
    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(not frozen)
        self.frozen = frozen

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        out = self.student(x)
        return F.mse_loss(out, self.teacher(x)) + F.mse_loss(out, y)


def test_a_teacher_follows() -> None:
    step = assert_as_eager(Taught)
    kinds = {spec.name: spec.kind for spec in step.inputs}
    assert kinds["teacher.weight"] == "buffer"
    assert kinds["teacher.bias"] == "parameter"


def test_a_trained_one_is_refused() -> None:
    with pytest.raises(CaptureRefused):
        graphaccel.optimize(Taught(frozen=False).double(), example_batch=batch_of(), devices=1)


class Likelihood(nn.Module):
    """Of a distribution that is checked, or not, or is a choice."""

    def __init__(self, kind: str, check: bool | None) -> None:
        super().__init__()
        self.layer, self.kind, self.check = nn.Linear(WIDTH, WIDTH), kind, check

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        if self.kind == "normal":
            return -Normal(h, 1.0, validate_args=self.check).log_prob(y).mean()
        chosen = (y > 0).long().sum(-1).clamp(max=WIDTH - 1)
        return -Categorical(logits=h, validate_args=self.check).log_prob(chosen).mean()


@pytest.mark.parametrize("check", [True, False, None])
@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_checks_of_a_distribution_are_left_out(kind: str, check: bool | None) -> None:
    assert_as_eager(lambda: Likelihood(kind, check), steps=1)
