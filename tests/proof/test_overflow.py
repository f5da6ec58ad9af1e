"""A forward that overflows in float16 and not in float32 is refused, with its line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.errors import PlanDiffers

WIDTH = 8


class Scaled(nn.Module):
    """Activations of a size, behind attention with a mask of the lowest float32; returns its loss.

    size: 1e5 overflows in float16.
    """

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size, self.first, self.last = size, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        least = torch.finfo(torch.float32).min
        mask = torch.full((len(x), WIDTH, WIDTH), least).triu(1)
        scores = (x.unsqueeze(1) * x.unsqueeze(2) + mask).softmax(-1)
        hidden = self.first((scores @ x.unsqueeze(2)).squeeze(2))
        large = hidden * self.size
        return F.mse_loss(self.last(large) / self.size, y)


def _step(size: float, precision: str) -> tuple[Tensor, nn.Module]:
    torch.manual_seed(0)
    model = Scaled(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1, precision=precision)
    loss = model(torch.randn(4, WIDTH), torch.randn(4, 1))
    loss.backward()
    return loss, model


def test_refused_with_the_line() -> None:
    with pytest.raises(PlanDiffers) as caught:
        _step(1e6, "fp16")
    error = caught.value
    assert error.overflow == "float16"
    assert error.values == ("loss: infinite or NaN in float16, finite in float32",)
    assert error.location is not None
    assert "large = hidden * self.size" in "\n".join(error.location.lines(""))


def test_what_the_help_says_trains() -> None:
    loss, model = _step(1e6, "bf16")
    assert torch.isfinite(loss)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_mask_and_gradients_that_overflow_are_no_reason() -> None:
    loss, _ = _step(1.0, "fp16")
    assert torch.isfinite(loss)


def test_a_loss_that_is_infinite_in_float32_too_is_the_models_own() -> None:
    loss, _ = _step(float("inf"), "fp16")
    assert not torch.isfinite(loss)
