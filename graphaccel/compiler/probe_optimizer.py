"""What an optimizer holds and makes in a step, found by stepping a few numbers.

A copy of the user's optimizer, which shares nothing that is written with it, steps one matrix of n
bytes, two, and four. With a, b and c the most that lived beside parameters, gradients and state, it
makes (c - b) / 2n for each byte of all tensors together, what is left of a for each by itself, and
what is then left of c for the one before it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphaccel.planner.estimate.optimizer_memory import Stepping
from graphaccel.runtime.meter import PeakMeter

Optimizer = torch.optim.Optimizer
_SIDE = 256
_SIZE = 4 * _SIDE * _SIDE
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_UNKNOWN = Stepping(together=1.0)


@dataclass(frozen=True)
class Tried:
    """state: bytes of optimizer state for each byte of parameters."""

    state: float
    stepping: Stepping


def tried_step(optimizer: Optimizer, device_type: str) -> Tried | None:
    """What a step of this optimizer needs on devices of that type. None where it can not be tried:
    one that is not of torch.optim, or takes no plain tensors or needs a closure.

    On CUDA, torch takes `foreach` where nothing else is asked for.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    found = []
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        if device_type == "cuda" and not settings.get("fused") and settings.get("foreach") is None:
            settings["foreach"] = "foreach" in settings or None
        try:
            found.append(_of_group(optimizer, settings))
        except Exception:  # whatever it is that this optimizer asks for
            return None
    return Tried(
        max(one.state for one in found),
        Stepping(
            max(one.stepping.together for one in found),
            max(one.stepping.each for one in found),
            max(one.stepping.before for one in found),
        ),
    )


def stepping_of(optimizer: Optimizer | None, device_type: str) -> Stepping:
    """What a step makes beside gradients and state; of one that can not be tried one copy of all
    that it steps is assumed."""
    if optimizer is None:
        return Stepping()
    found = tried_step(optimizer, device_type)
    return _UNKNOWN if found is None else found.stepping


def _of_group(optimizer: Optimizer, settings: dict[str, Any]) -> Tried:
    one, two, four = (_step(optimizer, settings, count) for count in (1, 2, 4))
    together = max(0.0, (four[1] - two[1]) / (2 * _SIZE))
    each = max(0.0, one[1] / _SIZE - together)
    before = max(0.0, four[1] / _SIZE - 4 * together - each)
    state = (four[0] - two[0]) / (2 * _SIZE)
    return Tried(round(state, 3), Stepping(*(round(n, 2) for n in (together, each, before))))


def _step(optimizer: Optimizer, settings: dict[str, Any], count: int) -> tuple[int, int]:
    """(bytes of state after a step, the most that two steps made beside it)."""
    with torch.enable_grad():
        params = [nn.Parameter(torch.ones(_SIDE, _SIDE)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    made = _copy(optimizer, {**settings, "params": params})
    start = [*params, *(p.grad for p in params if p.grad is not None)]
    with PeakMeter(resident=start) as meter:
        before = meter.current
        made.step()
        state = meter.current - before
        most = meter.peak - meter.current
        meter.reset_peak()
        made.step()
        most = max(most, meter.peak - meter.current)
    return state, most


def _copy(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    kind = type(optimizer)
    made = kind.__new__(kind)
    vars(made).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    made.param_groups, made.state = [group], defaultdict(dict)
    for name in _HOOKS:
        setattr(made, name, OrderedDict())
    return made
