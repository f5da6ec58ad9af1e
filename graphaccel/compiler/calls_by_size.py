"""Whether a forward calls the same operators for other sizes of a batch: `if len(x) > 16:`.

A step that is captured at two sizes has sizes as expressions, and one side of a branch that both
take alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from graphaccel.capture.batch import Batch
from graphaccel.capture.stepgraph import StepGraph


class CallsBySize:
    """Compares the operators of a forward with those at the capture of a step.

    called: (batch, training) → the operators, None where the forward does not run without data.
    """

    def __init__(self, called: Callable[[Batch, bool], tuple[Any, ...] | None]) -> None:
        self._called = called
        self._at_capture: dict[int, tuple[Hashable, tuple[Any, ...] | None]] = {}
        self._same: dict[Hashable, bool] = {}

    def note(self, step: StepGraph, batch: Batch, calls: tuple[Any, ...] | None) -> None:
        """A step was captured of this batch, and these are the operators of the forward."""
        if step.sizes:
            self._at_capture[id(step)] = batch.signature(), calls

    def hold(self, step: StepGraph, batch: Batch) -> bool:
        """Whether a step serves this batch, in the Python state of its capture."""
        signature, calls = self._at_capture.get(id(step), (None, None))
        if calls is None or signature == batch.signature():
            return True
        key = (id(step), batch.signature())
        if key not in self._same:
            now = self._called(batch, step.training)
            self._same[key] = now is None or now == calls
        return self._same[key]
