"""What happens in a step whose loss is NaN or infinite: nothing, no update, or an error."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from graphaccel.errors import GraphMisuse, NonFiniteLoss
from graphaccel.runtime.execution.state import StepResult

IGNORE, SKIP, ERROR = ON_NONFINITE = ("ignore", "skip", "error")


class LossGuard:
    """Looks at the loss of every step, which is the same on every rank: so is what follows."""

    def __init__(self, policy: str, rank: int = 0) -> None:
        """policy: one of ON_NONFINITE. rank: the first one reports a skipped step."""
        self._policy, self._rank = policy, rank
        self._steps = 0

    def refuse_outside(self) -> None:
        """Raises GraphMisuse (GA407) where the script computes the loss."""
        if self._policy != IGNORE:
            raise GraphMisuse(
                what=f"on_nonfinite={self._policy!r}, and the script computes the loss itself",
                help_line="if not loss.isfinite(): optimizer.zero_grad(); continue",
            )

    def checked(self, result: StepResult) -> tuple[StepResult, bool]:
        """The result of a step, and whether its update is skipped: without gradients then.

        Raises NonFiniteLoss (GA416) on every rank. Waits for the device, unless it ignores.
        """
        self._steps += 1
        if self._policy == IGNORE or result.loss is None or bool(torch.isfinite(result.loss)):
            return result, False
        value = float(result.loss)
        if self._policy == ERROR:
            raise NonFiniteLoss(step=self._steps, loss=str(value))
        if self._rank == 0:
            print(
                f"graphaccel: the loss of step {self._steps} is {value}: skipped", file=sys.stderr
            )
        return replace(result, overflow=torch.ones(())), True
