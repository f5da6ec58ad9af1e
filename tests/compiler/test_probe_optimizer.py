"""What optimizers hold and make in a step is what a step of theirs takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphaccel.compiler.model import optimizer_bytes
from graphaccel.compiler.probe_optimizer import optimizer_memory_of, tried_step
from graphaccel.planner.estimate.optimizer_memory import OptimizerMemory, step_bytes
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.meter import PeakMeter

optim = torch.optim
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW, loop": (optim.AdamW, {"foreach": False}),
    "AdamW, foreach": (optim.AdamW, {"foreach": True}),
    "AdamW, fused": (optim.AdamW, {"fused": True}),
    "AdamW, amsgrad": (optim.AdamW, {"amsgrad": True}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "RMSprop, foreach": (optim.RMSprop, {"foreach": True}),
    "Adadelta": (optim.Adadelta, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_a_step_takes(name: str) -> None:
    kind, settings = CASES[name]
    params = [nn.Parameter(torch.ones(n, 64)) for n in (50, 800, 300, 900, 10)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = kind(params, **settings)
    found = tried_step(optimizer, "cpu")
    assert found is not None
    assert not optimizer.state  # the user's own is as it was
    sizes = [p.numel() * 4 for p in params]
    with PeakMeter(resident=[*params, *(p.grad for p in params if p.grad is not None)]) as meter:
        start = meter.current
        optimizer.step()
        state = meter.current - start
        made = max(0, meter.peak - meter.current)
    assert state == pytest.approx(found.state * sum(sizes), rel=0.01, abs=64)
    assert made == pytest.approx(found.step_memory.needed(sum(sizes), sizes), rel=0.02, abs=64)
    assert optimizer_bytes(optimizer) == found.state


def test_on_cuda_torch_takes_foreach() -> None:
    params = [nn.Parameter(torch.ones(4))]
    assert optimizer_memory_of(optim.AdamW(params), "cuda") == OptimizerMemory(together=1.0)
    assert optimizer_memory_of(optim.AdamW(params, fused=True), "cuda") == OptimizerMemory()
    assert optimizer_memory_of(None, "cuda") == OptimizerMemory()


def test_what_can_not_be_tried_is_taken_to_make_a_copy() -> None:
    params = [nn.Parameter(torch.ones(4))]
    assert tried_step(optim.LBFGS(params), "cpu") is None
    assert optimizer_memory_of(optim.LBFGS(params), "cpu") == OptimizerMemory(together=1.0)


def test_zero_1_and_2_gather_two_buckets_after_it() -> None:
    plan = Plan(2, data=2, zero=1, bucket_bytes=100)
    made, sizes = OptimizerMemory(together=1.0), [40, 50, 20, 90, 10]  # buckets of 90, 20, 100
    assert step_bytes(plan, made, 105, [], sizes, fused=False) == 120
    assert step_bytes(plan, made, 300, [], sizes, fused=False) == 300
    assert step_bytes(plan, made, 300, [], sizes, fused=True) == 120
