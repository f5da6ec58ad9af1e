"""fp16: after an overflow the weights stay finite, whoever steps them and calls the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.support.small import Classifier, small_batch

PINS = [{}, {"fusions": "auto"}]
PLANTED = 1


def _batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = small_batch(seed=step)
    if step == PLANTED:
        x[-1] *= 1e4
    return x, y


def _finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_an_optimizer_that_calls_the_model_in_its_step(pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    graphaccel.optimize(model, optimizer, devices=1, precision="fp16", **pins)
    scales = []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(*_batch(step))
            loss.backward()
            return loss

        optimizer.step(closure)
        scales.append(model.graphaccel.loss_scale)
        assert _finite(model)
    assert scales == [65536.0, 32768.0, 32768.0]


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_a_second_optimizer(pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Classifier()
    weights = list(model.parameters())
    given, other = torch.optim.SGD(weights[:2], lr=0.1), torch.optim.Adam(weights[2:], lr=0.1)
    graphaccel.optimize(model, given, devices=1, precision="fp16", **pins)
    moved = []
    for step in range(3):
        before = [p.detach().clone() for p in weights]
        model(*_batch(step)).backward()
        for optimizer in (other, given):
            optimizer.step()
            optimizer.zero_grad()
        moved.append([not torch.equal(p, b) for p, b in zip(weights, before, strict=True)])
        assert _finite(model)
    assert moved == [[step != PLANTED] * len(weights) for step in range(3)]
    assert model.graphaccel.loss_scale == 32768.0
