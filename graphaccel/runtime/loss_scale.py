"""Dynamic loss scaling for fp16: gradients too small for fp16 survive, overflows skip the step.

Micikevicius et al., Mixed Precision Training, 2018, §3.2; the constants are those of
torch.amp.GradScaler. The scale is on the device; the host does not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphaccel.compat.torch.optimizers import update_scale


@dataclass
class LossScale:
    """factor: what the loss is multiplied by, a float32 scalar on the device. It halves at an
    overflow and doubles after `interval` updates without one. each_call: whether every call of the
    model counts as an update; otherwise all calls up to a step of the optimizer are one."""

    device: torch.device
    interval: int = 2000
    factor: Tensor = field(init=False)
    good_steps: Tensor = field(init=False)
    each_call: bool = field(default=True, init=False)
    _overflow: Tensor = field(init=False)
    _calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.factor = torch.full((), 65536.0, device=self.device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=self.device)
        self._overflow = torch.zeros((), device=self.device)

    def record(self, overflow: Tensor) -> None:
        """Count a call of the model. overflow: nonzero if a gradient on some rank was not
        finite."""
        self._overflow = torch.maximum(self._overflow, overflow)
        self._calls += 1
        if self.each_call:
            self.update()

    def update(self) -> None:
        """Update the scale after the calls of an update, if there were any."""
        if self._calls:
            update_scale(self.factor, self.good_steps, self._overflow, self.interval)
            self._overflow, self._calls = torch.zeros_like(self._overflow), 0

    def restore(self, factor: float, good_steps: int) -> None:
        """Go on from a checkpoint's values."""
        self.factor.fill_(factor)
        self.good_steps.fill_(good_steps)
        self._overflow, self._calls = torch.zeros_like(self._overflow), 0
