"""fp16: an overflow of one data rank's rows skips the step on all ranks, and the scale recovers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("data", "zero1", "zero3", "pipeline", "tensor")
STEPS, PLANTED, INTERVAL = 14, (2, 8), 4
Life = tuple[list[float], list[bool], list[float], dict[str, Tensor]]
"""Losses, whether each step changed weights, the scale after it, and the weights at the end."""


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """The last row of planted ones is so large that its gradients overflow fp16, not its loss."""
    x, y = small_batch(seed=step)
    if step in PLANTED:
        x[-1] *= 1e4
    return x, y


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Classifier()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _eager() -> Life:
    """By torch.amp.GradScaler."""
    model, optimizer = _built()
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    losses, moved, scales = [], [], []
    for step in range(STEPS):
        before = {name: p.clone() for name, p in model.state_dict().items()}
        with torch.autocast("cpu", torch.float16):
            loss = model(*_batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(p, before[n]) for n, p in model.state_dict().items()))
    return losses, moved, scales, model.state_dict()


@captures_of("loss scale")
def _ours(kind: str) -> Life:
    model, optimizer = _built()
    graphaccel.optimize(
        model, optimizer, devices=2, precision="fp16", example_batch=_batch(0), **PLANS[kind]
    )
    model.graphaccel.session.scale.interval = INTERVAL
    losses, moved, scales = [], [], []
    for step in range(STEPS):
        before = graphaccel.full_state_dict(model)
        loss = model(*_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(model.graphaccel.loss_scale)
        after = graphaccel.full_state_dict(model)
        moved.append(any(not torch.equal(p, before[name]) for name, p in after.items()))
    return losses, moved, scales, after


@pytest.mark.parametrize("kind", PLANS)
def test_the_scale_falls_and_recovers_as_torchs_does(pool: Pool, kind: str) -> None:
    losses, moved, scales, weights = _eager()
    assert moved == [step not in PLANTED for step in range(STEPS)]
    assert all(map(math.isfinite, losses))  # only gradients overflow
    whole = 65536.0
    assert scales == [whole, whole, *[whole / 2] * 4, *[whole] * 2, *[whole / 2] * 4, whole, whole]
    for ours in pool.run(2, _ours, kind):
        assert ours[1:3] == (moved, scales)
        assert ours[0] == pytest.approx(losses, rel=5e-3)
        for name, value in weights.items():
            torch.testing.assert_close(ours[3][name], value, rtol=2e-2, atol=5e-3)
