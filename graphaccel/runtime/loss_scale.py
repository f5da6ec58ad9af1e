"""Dynamic loss scaling for fp16: gradients too small for fp16 survive, overflows skip the step.

Micikevicius et al., Mixed Precision Training, 2018, §3.2; the constants are those of
torch.amp.GradScaler.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """factor: what the loss is multiplied by. It halves at an overflow and doubles after `interval`
    steps without one."""

    factor: float = 65536.0
    interval: int = 2000
    good_steps: int = 0
    overflows: int = 0

    def update(self, finite: bool) -> None:
        """Take note of a step: whether all gradients on all ranks were finite."""
        if finite:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.factor, self.good_steps = self.factor * 2.0, 0
        else:
            self.factor, self.good_steps = self.factor / 2.0, 0
            self.overflows += 1
