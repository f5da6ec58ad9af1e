"""The package's `sys.excepthook`: how an error that ends the script is printed.

An error that all ranks have is said once: one of ours with the lines of the script alone, one that
the script's forward raises under a plan without the frames of this package. An error of memory that
the optimizer's step or the script's own code raises is torch's: what was predicted is said behind
it. Within a planned step it is DeviceOutOfMemory (GA502).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from traceback import format_exception_only
from types import FrameType, TracebackType
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
        if said_by_first("".join(format_exception_only(kind, error))):
            return
        if isinstance(error, GraphAccelError):
            self._say(kind, error, trace)
            return
        self._show(kind, error, _below_script(trace))
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
        before = error.__cause__, error.__suppress_context__
        cause = error.__cause__
        full = os.environ.get("GRAPHACCEL_TRACEBACK") == "full"
        if not full and (cause is None or not _of_script(cause.__traceback__)):
            error.__cause__ = None  # sets __suppress_context__, too
        try:
            self._show(kind, error, _of_script(trace))
        finally:  # a debugger reads it afterwards
            error.__cause__, error.__suppress_context__ = before

    def _show(
        self, kind: type[BaseException], error: BaseException, shown: TracebackType | None
    ) -> None:
        """Print an error with these frames; with all where there are none, or all are asked for."""
        before = error.__traceback__
        if shown is None or os.environ.get("GRAPHACCEL_TRACEBACK") == "full":
            shown = before
        try:
            self._before(kind, error.with_traceback(shown), shown)
        finally:
            error.__traceback__ = before


def hooked() -> Uncaught:
    """The package's hook, which is set if it is not the outermost one."""
    current = sys.excepthook
    if not isinstance(current, Uncaught):
        sys.excepthook = current = Uncaught()
    return current


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback of the frames of the script's own files; None where there are none."""
    return _only(trace, is_of_script)


def _below_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package between the script's; None where there are
    none."""
    frames, step = [], trace
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    last = max((i for i, frame in enumerate(frames) if is_of_script(frame)), default=0)
    between = {id(frame) for frame in frames[:last] if _is_ours(frame)}
    return _only(trace, lambda frame: id(frame) not in between) if between else None


def _only(trace: TracebackType | None, shown: Callable[[FrameType], bool]) -> TracebackType | None:
    """A traceback of some of its frames."""
    if trace is None:
        return None
    inner = _only(trace.tb_next, shown)
    if not shown(trace.tb_frame):
        return inner
    return TracebackType(inner, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("graphaccel.")


def _doing(trace: TracebackType | None) -> str:
    """What ran: the frames of an optimizer's step have it as `self`."""
    while trace is not None:
        if isinstance(trace.tb_frame.f_locals.get("self"), torch.optim.Optimizer):
            return "the optimizer's step"
        trace = trace.tb_next
    return "the script's own code"
