"""Whether a step fits, the fewest devices and the largest batch, against plans made one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel.errors import BadPin, InfeasiblePlan

pytestmark = pytest.mark.usefixtures("shared_captures")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def job(rows: int = 64) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Net(), torch.empty(rows, 512)


MIB = 2**20


def test_a_fit_is_that_of_the_plan() -> None:
    model, batch = job()
    fit = graphaccel.fits(model, batch, devices=1, memory=2**33)
    assert fit
    assert fit.verdict == "safe"
    assert fit.plan is not None
    assert fit.plan.prediction is not None
    assert fit.high == pytest.approx(max(m.peak for m in fit.plan.prediction.memory), rel=1e-6)
    assert fit.low < fit.expected < fit.high <= fit.available == 2**33


def test_what_does_not_fit_says_why() -> None:
    model, batch = job()
    needs = graphaccel.fits(model, batch, devices=1, memory=2**33)
    fit = graphaccel.fits(model, batch, devices=1, memory=needs.low // 2, offload="none")
    assert not fit
    assert fit.reason.startswith("error[GA201]")
    assert fit.low > fit.available
    assert fit.verdict in ("risky", "impossible")


def test_fewest_devices_and_their_plan() -> None:
    model, batch = job()
    one = graphaccel.fits(model, batch, devices=1, memory=2**33, offload="none", recompute="none")
    memory = one.high - 4 * MIB
    pins = {"memory": memory, "offload": "none", "recompute": "none", "microbatches": 1}
    count = graphaccel.fewest_devices(model, batch, most=8, **pins)
    assert count == 2
    assert graphaccel.fewest_devices(model, batch, most=1, **pins) is None
    with pytest.raises(InfeasiblePlan):
        graphaccel.plan(model, batch, devices=1, **pins)
    assert graphaccel.plan(model, batch, devices=2, **pins).devices == 2


def test_the_largest_batch_fits_and_a_sixteenth_more_does_not() -> None:
    model, batch = job()
    pins = {"memory": 700 * MIB, "offload": "none", "recompute": "none", "device": "cpu"}
    size = graphaccel.largest_batch(model, batch, devices=1, **pins)
    assert size is not None
    assert graphaccel.fits(model, job(size)[1], devices=1, microbatches=1, **pins)
    more = job(size + max(1, size // 16) + 1)[1]
    assert not graphaccel.fits(model, more, devices=1, microbatches=1, **pins)
    assert graphaccel.largest_batch(model, batch, devices=1, **{**pins, "memory": MIB}) is None


def test_a_wrong_pin_is_refused() -> None:
    model, batch = job()
    with pytest.raises(BadPin):
        graphaccel.fits(model, batch, devices=1, tensor=3)
