"""fp16: an overflow of one data rank's rows skips the step on all ranks, and the scale recovers.

So does one in any of the calls whose gradients a step accumulates, as under torch.amp.GradScaler.
"""

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
FUSED = {f"{kind}, fused": {**PLANS[kind], "fusions": "auto"} for kind in ("data", "pipeline")}
STEPS, INTERVAL = 14, 4
PLANTED = {1: ((2, 0), (8, 0)), 2: ((2, 1), (8, 0), (9, 0), (9, 1))}
"""By how many calls a step accumulates: the steps, and the calls in them, that overflow."""
Life = tuple[list[float], list[bool], list[float], dict[str, Tensor]]
"""Losses, whether each step changed weights, the scale after it, and the weights at the end."""


def _batch(step: int, call: int = 0, calls: int = 1) -> tuple[Tensor, Tensor]:
    """The last row of planted ones is so large that its gradients overflow fp16, not its loss."""
    x, y = small_batch(seed=step + STEPS * call)
    if (step, call) in PLANTED[calls]:
        x[-1] *= 1e4
    return x, y


def _built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Classifier()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _eager(calls: int = 1) -> Life:
    """By torch.amp.GradScaler."""
    model, optimizer = _built()
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    losses, moved, scales = [], [], []
    for step in range(STEPS):
        before = {name: p.clone() for name, p in model.state_dict().items()}
        for call in range(calls):
            with torch.autocast("cpu", torch.float16):
                loss = model(*_batch(step, call, calls)) / calls
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(p, before[n]) for n, p in model.state_dict().items()))
    return losses, moved, scales, model.state_dict()


@captures_of("loss scale")
def _ours(kind: str, calls: int = 1) -> Life:
    model, optimizer = _built()
    pins = {**PLANS, **FUSED}[kind]
    graphaccel.optimize(
        model, optimizer, devices=2, precision="fp16", example_batch=_batch(0), **pins
    )
    model.graphaccel.session.scale.interval = INTERVAL
    losses, moved, scales = [], [], []
    for step in range(STEPS):
        before = graphaccel.full_state_dict(model)
        for call in range(calls):
            loss = model(*_batch(step, call, calls)) / calls
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scales.append(model.graphaccel.loss_scale)
        after = graphaccel.full_state_dict(model)
        moved.append(any(not torch.equal(p, before[name]) for name, p in after.items()))
    return losses, moved, scales, after


@pytest.mark.parametrize("kind", PLANS)
def test_the_scale_falls_and_recovers_as_torchs_does(pool: Pool, kind: str) -> None:
    losses, moved, scales, weights = _eager()
    assert moved == [(step, 0) not in PLANTED[1] for step in range(STEPS)]
    assert all(map(math.isfinite, losses))  # only gradients overflow
    whole = 65536.0
    assert scales == [whole, whole, *[whole / 2] * 4, *[whole] * 2, *[whole / 2] * 4, whole, whole]
    for ours in pool.run(2, _ours, kind):
        assert ours[1:3] == (moved, scales)
        assert ours[0] == pytest.approx(losses, rel=5e-3)
        for name, value in weights.items():
            torch.testing.assert_close(ours[3][name], value, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("kind", [*PLANS, *FUSED])
def test_an_overflow_in_one_of_the_calls_of_a_step(pool: Pool, kind: str) -> None:
    losses, moved, scales, weights = _eager(calls=2)
    assert moved == [step not in (2, 8, 9) for step in range(STEPS)]
    assert all(map(math.isfinite, losses))
    # A planted row multiplies the rounding of weights, too, by 1e4.
    others = [i for i in range(len(losses)) if divmod(i, 2) not in PLANTED[2]]
    for ours in pool.run(2, _ours, kind, 2):
        assert ours[1:3] == (moved, scales)
        compared = [ours[0][i] for i in others]
        assert compared == pytest.approx([losses[i] for i in others], rel=5e-3)
        for name, value in weights.items():
            torch.testing.assert_close(ours[3][name], value, rtol=2e-2, atol=5e-3)
