"""The package's `sys.excepthook`: how an error that ends the script is printed.

An error of ours is said once for all ranks, with the lines of the script and without the frames of
this package and of torch between them. An error of memory that the optimizer's step or the script's
own code raises is torch's: what was predicted is said behind it. Within a planned step it is
DeviceOutOfMemory (GA502).
"""

from __future__ import annotations

import os
import sys
import weakref
from types import TracebackType
from typing import Any, Protocol

import torch

from graphaccel.dispatch.steps import Steps
from graphaccel.errors import GraphAccelError
from graphaccel.errors.messages import is_of_script
from graphaccel.runtime.execution.out_of_memory import is_out_of_memory, out_of_memory
from graphaccel.runtime.first_error import said_by_first

_SAID = "_graphaccel_said"


class HasSteps(Protocol):
    """What `model.graphaccel` is: steps are None before the plan."""

    steps: Steps | None


class Uncaught:
    """A `sys.excepthook` in front of the one before it."""

    def __init__(self) -> None:
        self._before: Any = sys.excepthook
        self._models: dict[int, weakref.ref[HasSteps]] = {}
        self._last: tuple[weakref.ref[HasSteps], torch.device] | None = None

    def explain_memory(self, model: HasSteps, device: torch.device) -> None:
        """Errors of memory are explained by this model's plan from now on, while it is alive. With
        the last model the hook is taken off."""
        key = id(model)
        self._models[key] = weakref.ref(model, lambda _: self._gone(key))
        self._last = self._models[key], device

    def remove(self) -> None:
        """Restore the hook before this one, unless another one was set since."""
        if sys.excepthook is self:
            sys.excepthook = self._before

    def _gone(self, key: int) -> None:
        self._models.pop(key, None)
        if not self._models:
            self.remove()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if hasattr(error, _SAID):  # by one that was set later, which stands in front of this one
            self._before(kind, error, trace)
            return
        setattr(error, _SAID, True)
        if isinstance(error, GraphAccelError):
            if not said_by_first(str(error)):
                self._say(kind, error, trace)
            return
        self._before(kind, error, trace)
        model, device = (None, None) if self._last is None else (self._last[0](), self._last[1])
        if model is None or model.steps is None or device is None:
            return
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            explained = out_of_memory(None, device, _doing(trace))
            print(model.steps.beside_prediction(explained), file=sys.stderr)

    def _say(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an error of ours with the script's frames alone, and its cause where that is the
        script's."""
        if os.environ.get("GRAPHACCEL_TRACEBACK") == "full":
            self._before(kind, error, trace)
            return
        before = error.__traceback__, error.__cause__, error.__suppress_context__
        cause = error.__cause__
        if cause is None or not _of_script(cause.__traceback__):
            error.__cause__ = None  # sets __suppress_context__, too
        try:
            own = _of_script(trace) or trace
            self._before(kind, error.with_traceback(own), own)
        finally:  # a debugger reads it afterwards
            error.__traceback__, error.__cause__, error.__suppress_context__ = before


def hooked() -> Uncaught:
    """The package's hook, which is set if it is not the outermost one."""
    current = sys.excepthook
    if not isinstance(current, Uncaught):
        sys.excepthook = current = Uncaught()
    return current


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback of the frames of the script's own files; None where there are none."""
    if trace is None:
        return None
    inner = _of_script(trace.tb_next)
    if not is_of_script(trace.tb_frame):
        return inner
    return TracebackType(inner, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _doing(trace: TracebackType | None) -> str:
    """What ran: the frames of an optimizer's step have it as `self`."""
    while trace is not None:
        if isinstance(trace.tb_frame.f_locals.get("self"), torch.optim.Optimizer):
            return "the optimizer's step"
        trace = trace.tb_next
    return "the script's own code"
