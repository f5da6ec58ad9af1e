"""Determines whether an optimizer steps a tensor that is a part of each row of another in place.

torch's own loops read strides; fused kernels, and some of others, take the memory from a tensor's
start on as one range, and would update numbers of other rows (`p.view(-1)` raises). So two small
tensors are stepped by copies of the optimizer, one of them contiguous, and compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.runtime.parameters.optimizer_copy import copy_of, shared_attribute

Optimizer = torch.optim.Optimizer
_KERNELS = "fused", "foreach", "capturable", "differentiable", "amsgrad"
_STEPS, _STEP = 2, 0.1
_BOUND = 0.05
"""Of the difference, in updates: more than 16 bits round, less than any number of another row."""


class Strides:
    """What is known of one optimizer: asked in every step, tried again when its settings change."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], bool] = {}

    def read_by(self, optimizer: Optimizer) -> bool:
        """Whether parameters, gradients and state may be parts of rows."""
        groups = optimizer.param_groups
        key = tuple(tuple(bool(g.get(name)) for name in _KERNELS) for g in groups)
        if key not in self._known:
            self._known[key] = not shared_attribute(optimizer) and _tried(optimizer)
        return self._known[key]


def _tried(optimizer: Optimizer) -> bool:
    drawn = torch.get_rng_state()
    try:
        return all(_equal(optimizer, group) for group in optimizer.param_groups)
    except Exception:  # the optimizer may raise anything
        return False
    finally:
        torch.set_rng_state(drawn)


def _equal(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a part of rows is stepped as the same numbers in one range are."""
    like = next((p for p in group["params"] if p.is_floating_point()), None)
    if like is None:
        return True
    numbers = torch.linspace(-1, 1, 40, dtype=like.dtype, device=like.device).view(5, 8)
    values, gradient = numbers[:, 2:6], numbers.flip(0)[:, 1:5]
    settings = {k: v for k, v in group.items() if k != "params"}
    if "lr" in settings:  # a schedule may begin with 0
        settings["lr"] = _STEP if not torch.is_tensor(lr := group["lr"]) else lr.new_tensor(_STEP)
    updates = []
    for part in (values, values.contiguous()):
        with torch.enable_grad():
            parameter = nn.Parameter(_copied(part))
        built = copy_of(optimizer, {**settings, "params": [parameter]})
        for _ in range(_STEPS):
            parameter.grad = _copied(gradient if part is values else gradient.contiguous())
            built.step()
        updates.append(parameter.detach() - values)
    moved = updates[1].abs().max()
    return bool((updates[0] - updates[1]).abs().max() <= _BOUND * moved) and bool(moved > 0)


def _copied(tensor: Tensor) -> Tensor:
    """The same numbers in memory of their own, with the same strides."""
    size = tensor.stride(0) * len(tensor)
    built = tensor.new_empty(size).as_strided(tensor.shape, tensor.stride())
    return built.copy_(tensor)
