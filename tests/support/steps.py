"""A few steps of a small model, in eager mode and under a plan of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.capture.stepgraph import StepGraph
from tests.support.inside import captures_in

WIDTH, ROWS = 6, 8


def batch_of(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Two float64 tensors of [ROWS, WIDTH]."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def trained(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """The losses of `steps` steps on `batch_of()`."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch_of())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_eager(make: Callable[[], nn.Module], steps: int = 3, **pins: Any) -> StepGraph:
    """Assert in float64 that `steps` SGD steps change a model, made twice from one seed, as eager
    mode does; the captured step."""
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    planned = make().double()
    wanted = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.3), steps)
    planned, optimizer = graphaccel.optimize(
        planned, torch.optim.SGD(planned.parameters(), lr=0.3), devices=1, **pins
    )
    got = trained(planned, optimizer, steps)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)
    for (name, true), own in zip(
        plain.state_dict().items(), planned.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(own, true, rtol=1e-11, atol=1e-13, msg=name)
    return next(iter(captures_in(planned).steps.values()))
