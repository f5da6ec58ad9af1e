"""Frozen parameters that the forward updates (a teacher that follows its student)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
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


def test_a_distribution_says_what_to_leave_out() -> None:
    class Likelihood(nn.Module):
        def __init__(self, check: bool | None) -> None:
            super().__init__()
            self.layer, self.check = nn.Linear(WIDTH, WIDTH), check

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            made = torch.distributions.Normal(self.layer(x), 1.0, validate_args=self.check)
            return -made.log_prob(y).mean()

    with pytest.raises(graphaccel.errors.TensorBranch, match="validate_args=False"):
        graphaccel.optimize(Likelihood(True).double(), example_batch=batch_of(), devices=1)
    assert_as_eager(lambda: Likelihood(False), steps=1)
