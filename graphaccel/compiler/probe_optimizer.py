"""Measures an optimizer's state and temporary memory by stepping a few small tensors.

A copy of the user's optimizer, which shares nothing mutable with it, steps one matrix of n bytes,
two, and four. With a, b and c the peak bytes beside parameters, gradients and state, it allocates
(c - b) / 2n for each byte of all tensors together, the rest of a for each tensor by itself, and the
rest of c for the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphaccel.planner.estimate.optimizer_memory import OptimizerMemory
from graphaccel.runtime.meter import PeakMeter
from graphaccel.runtime.parameters.optimizer_copy import copy_of

Optimizer = torch.optim.Optimizer
_SIDE = 256
_SIZE = 4 * _SIDE * _SIDE
_UNKNOWN = OptimizerMemory(together=1.0)


@dataclass(frozen=True)
class Tried:
    """The result. state: bytes of optimizer state for each byte of parameters."""

    state: float
    step_memory: OptimizerMemory


def tried_step(optimizer: Optimizer, device_type: str) -> Tried | None:
    """What a step of this optimizer needs on devices of that type. None where it cannot be tried:
    it is not of torch.optim, takes no plain tensors or needs a closure.

    On CUDA, torch uses `foreach` by default.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    results = []
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        if device_type == "cuda" and not settings.get("fused") and settings.get("foreach") is None:
            settings["foreach"] = "foreach" in settings or None
        try:
            results.append(_of_group(optimizer, settings))
        except Exception:  # the optimizer may raise anything
            return None
    return Tried(
        max(one.state for one in results),
        OptimizerMemory(
            max(one.step_memory.together for one in results),
            max(one.step_memory.each for one in results),
            max(one.step_memory.before for one in results),
        ),
    )


def optimizer_memory_of(optimizer: Optimizer | None, device_type: str) -> OptimizerMemory:
    """Memory that a step allocates beside gradients and state; for an optimizer that cannot be
    tried, one copy of all that it steps."""
    if optimizer is None:
        return OptimizerMemory()
    result = tried_step(optimizer, device_type)
    return _UNKNOWN if result is None else result.step_memory


def _of_group(optimizer: Optimizer, settings: dict[str, Any]) -> Tried:
    one, two, four = (_step(optimizer, settings, count) for count in (1, 2, 4))
    together = max(0.0, (four[1] - two[1]) / (2 * _SIZE))
    each = max(0.0, one[1] / _SIZE - together)
    before = max(0.0, four[1] / _SIZE - 4 * together - each)
    state = (four[0] - two[0]) / (2 * _SIZE)
    return Tried(round(state, 3), OptimizerMemory(*(round(n, 2) for n in (together, each, before))))


def _step(optimizer: Optimizer, settings: dict[str, Any], count: int) -> tuple[int, int]:
    """(bytes of state after a step, peak of two steps' temporary bytes)."""
    with torch.enable_grad():
        params = [nn.Parameter(torch.ones(_SIDE, _SIDE)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    built = copy_of(optimizer, {**settings, "params": params})
    start = [*params, *(p.grad for p in params if p.grad is not None)]
    with PeakMeter(resident=start) as meter:
        before = meter.current
        built.step()
        state = meter.current - before
        most = meter.peak - meter.current
        meter.reset_peak()
        built.step()
        most = max(most, meter.peak - meter.current)
    return state, most
