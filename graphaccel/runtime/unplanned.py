"""Refuses a training that runs beside the plan: in evaluation mode only, or through submodules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.capture.export.outputs import flatten_output
from graphaccel.errors import GraphMisuse
from graphaccel.progress import progress

HELP = "model.eval(); model.training = True"
"""Trains in evaluation mode: the root module alone says whether a forward is a training step."""
_AROUND = (
    "optimizer.step() on gradients that no call of the optimized model computed: no plan is used"
)
_WHAT = "gradients of forwards in evaluation mode only: no plan is made for these, nor used"


class Unplanned:
    """Notices backwards of plain forwards before there is a plan, and refuses the optimizer's step.

    planned: whether there is a plan. A plain forward beside planned steps adds its own gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        planned: Callable[[], bool],
    ) -> None:
        self._model, self._planned, self._trained = model, planned, False
        self._optimizer = optimizer

    def watch(self, output: Any) -> None:
        """Notice a backward from what a plain forward returned."""
        if self._planned() or not torch.is_grad_enabled():
            return
        for leaf in flatten_output(output)[0]:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._mark)

    def _mark(self, _gradient: Tensor) -> None:
        if self._optimizer is None and not self._trained:
            progress("not planned", _WHAT, 0.0)
        self._trained = True

    def before_step(self, *_: Any) -> None:
        """A hook of the optimizer's steps. Raises GraphMisuse (GA407)."""
        if self._planned():
            return
        if self._trained:
            raise GraphMisuse(
                what=f"optimizer.step() on {_WHAT}",
                help_line=f"to train with dropout off and batch statistics fixed:  {HELP}",
                other_help="to train as usual:  model.train()",
            )
        if any(p.grad is not None for p in nn.Module.parameters(self._model)):
            raise GraphMisuse(
                what=_AROUND,
                help_line="call the model itself, not a module in it:  output = model(batch)",
                other_help="or optimize the module that is called:  "
                "graphaccel.optimize(model.module, optimizer)",
            )
