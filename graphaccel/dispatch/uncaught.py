"""Explains an error of memory that ends the script, wherever it was raised.

Within a planned step it is DeviceOutOfMemory (GA502). The optimizer's step, whose state is
allocated by the first update, and the script's own code raise torch's error: what was predicted is
said behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from graphaccel.dispatch.steps import Steps
from graphaccel.errors import GraphAccelError
from graphaccel.runtime.execution.out_of_memory import is_out_of_memory, out_of_memory


class HasSteps(Protocol):
    """What `model.graphaccel` is: steps are None before the plan."""

    steps: Steps | None


class ExplainedMemory:
    """A `sys.excepthook` that calls the one before it, then explains errors of memory.

    holder: returns what has the steps of the model that was optimized last; None once it is gone.
    """

    def __init__(self, holder: Callable[[], HasSteps | None], device: torch.device) -> None:
        before = sys.excepthook
        self._before: Any = before._before if isinstance(before, ExplainedMemory) else before
        self._holder, self._device = holder, device

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._before(kind, error, trace)
        holder = self._holder()
        steps = None if holder is None else holder.steps
        if steps is None or isinstance(error, GraphAccelError):
            return
        if not (isinstance(error, RuntimeError) and is_out_of_memory(error)):
            return
        explained = out_of_memory(None, self._device, _doing(trace))
        print(steps.beside_prediction(explained), file=sys.stderr)


def _doing(trace: TracebackType | None) -> str:
    """What ran: the frames of an optimizer's step have it as `self`."""
    while trace is not None:
        if isinstance(trace.tb_frame.f_locals.get("self"), torch.optim.Optimizer):
            return "the optimizer's step"
        trace = trace.tb_next
    return "the script's own code"
