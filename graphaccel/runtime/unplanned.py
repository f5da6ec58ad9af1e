"""Refuses a training that runs beside the plan: one whose forwards are all in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphaccel.capture.export.outputs import flatten_output
from graphaccel.errors import GraphMisuse
from graphaccel.progress import progress

HELP = "model.eval(); model.training = True"
"""Trains in evaluation mode: the root module alone says whether a forward is a training step."""
_WHAT = "gradients of forwards in evaluation mode only: no plan is made for these, nor used"


class Unplanned:
    """Notices backwards of plain forwards before there is a plan, and refuses the optimizer's step.

    planned: whether there is a plan. A plain forward beside planned steps adds its own gradients.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, planned: Callable[[], bool]
    ) -> None:
        self._planned, self._trained = planned, False
        self._optimizer = optimizer  # without a hook until there is something to refuse

    def watch(self, output: Any) -> None:
        """Notice a backward from what a plain forward returned."""
        if self._planned() or not torch.is_grad_enabled():
            return
        for leaf in flatten_output(output)[0]:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._mark)

    def _mark(self, _gradient: Tensor) -> None:
        if self._trained:
            return
        self._trained = True
        if self._optimizer is None:
            progress("not planned", _WHAT, 0.0)
        else:
            self._optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        """Raises GraphMisuse (GA407)."""
        if self._trained and not self._planned():
            raise GraphMisuse(
                what=f"optimizer.step() on {_WHAT}",
                help_line=f"to train with dropout off and batch statistics fixed:  {HELP}",
                other_help="to train as usual:  model.train()",
            )
