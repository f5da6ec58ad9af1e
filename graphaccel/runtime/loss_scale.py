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
    overflow and doubles after `interval` steps without one."""

    device: torch.device
    interval: int = 2000
    factor: Tensor = field(init=False)
    good_steps: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.factor = torch.full((), 65536.0, device=self.device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=self.device)

    def update(self, overflow: Tensor) -> None:
        """Update the scale after a step. overflow: nonzero if a gradient on some rank was not
        finite."""
        update_scale(self.factor, self.good_steps, overflow, self.interval)
