"""Clipping some parameters of a model in a pipeline: right, or refused, and no rank waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.errors import ElsewhereNeeded
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

BOUND = 1e-3  # gradients are larger


class Net(nn.Module):
    """Six layers, the last with the weights of the first if `tied`; returns its loss."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])
        self.head = nn.Linear(4, 4)
        if tied:
            self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(self.head(x), y)


Parameters = Iterable[nn.Parameter]


def _by_hand(parameters: Parameters) -> None:
    own = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack([g.norm() for g in own]).norm()
    for gradient in own:
        gradient.mul_((BOUND / (total + 1e-6)).clamp(max=1.0))


def _total(parameters: Parameters) -> None:
    own = list(parameters)
    total = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
    nn.utils.clip_grads_with_norm_(own, BOUND, total)


CLIPS: dict[str, Callable[[Any], None]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, BOUND),
    "infinity": lambda p: nn.utils.clip_grad_norm_(p, BOUND, norm_type=float("inf")),
    "value": lambda p: nn.utils.clip_grad_value_(p, BOUND),
    "total": _total,
    "by hand": _by_hand,
}
PARTS: dict[str, Callable[[Any], Parameters]] = {
    "first": lambda m: m.layers[0].parameters(),
    "middle": lambda m: m.layers[2:4].parameters(),
    "head": lambda m: m.head.parameters(),
    "two ends": lambda m: [*m.layers[0].parameters(), *m.head.parameters()],
    "one": lambda m: [m.head.bias],
}


@captures_of("clipped parts")
def _clipped(ranks: int, tied: bool) -> float:
    """The largest difference from plain of all weights after a step with each clip of each part."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(Net(tied).double())
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.05))
    pins: dict[str, Any] = {"pipeline": ranks, "microbatches": 2}
    graphaccel.optimize(models[1], optimizers[1], devices=ranks, **pins)
    furthest = 0.0
    for clip in CLIPS.values():
        for part in PARTS.values():
            for model, optimizer in zip(models, optimizers, strict=True):
                model(x, y).backward()
                clip(part(model))
                optimizer.step()
                optimizer.zero_grad()
            plain, ours = models[0].state_dict(), graphaccel.full_state_dict(models[1])
            furthest = max(furthest, *(float((plain[n] - ours[n]).abs().max()) for n in plain))
    return furthest


@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_of_some_stages_are_clipped_as_on_one_device(pool: Pool, ranks: int) -> None:
    assert max(pool.run(ranks, _clipped, ranks, False, timeout_s=60)) < 1e-12


@captures_of("clipped parts")
def _tied() -> str:
    """The tied weight is on two ranks, the bias on one of them: the other one can not know whether
    the first comes to it for the norm."""
    torch.manual_seed(0)
    model = Net(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=3, pipeline=3, microbatches=2)
    model(*torch.randn(2, 4, 4)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), BOUND)
    try:
        nn.utils.clip_grad_norm_(model.head.parameters(), BOUND)
    except ElsewhereNeeded as error:
        return str(error)
    return ""


def test_where_it_can_not_be_known_who_has_all_it_is_refused(pool: Pool) -> None:
    texts = pool.run(3, _tied, timeout_s=60)
    assert sum("GA408" in text for text in texts) == 1
