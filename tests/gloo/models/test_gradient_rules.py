"""Gradient rules that are Python, and layers reached by functions, over several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import graphaccel
from tests.gloo.scripts.test_semantics import own_gradients
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

ROWS, WIDTH = 8, 8


class Ruled(nn.Module):
    """A Function of a class that only this process has, a hook, a checkpoint, a closure."""

    def __init__(self) -> None:
        super().__init__()

        class Quantize(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, scale: Tensor, levels: int) -> Tensor:
                ctx.save_for_backward(x, scale)
                return (x * levels).round() / levels * scale

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                x, scale = ctx.saved_tensors
                return gradient * scale * (x.abs() < 1), (gradient * x).sum(0), None

        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.quantize = Quantize.apply
        second = self.second
        self.after = lambda x: torch.tanh(second(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.quantize(self.first(x), self.scale, 4)
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g * 0.5)
        hidden = torch.utils.checkpoint.checkpoint(self.after, hidden, use_reentrant=True)
        return F.mse_loss(self.after(hidden), y)


def _worst(pins: dict[str, Any]) -> float:
    torch.manual_seed(5)
    plain, planned = (
        Ruled().double(),
        Ruled().double(),
    )  # a function stays the first one's in a copy
    planned.load_state_dict(plain.state_dict())
    graphaccel.optimize(planned, devices=2, **pins)
    batch = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    for model in (plain, planned):
        model(*batch).backward()
    return own_gradients(plain, planned)


@pytest.mark.parametrize(
    "pins", [{"data": 2}, {"pipeline": 2, "microbatches": 4}], ids=["data", "pipeline"]
)
def test_gradients_of_rules(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _worst, pins)) <= 1e-12
