"""The test hook: what tests read or set inside an optimized model, and users have no use for.

No other file of the tests names a private attribute of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from graphaccel.compiler.captures import Captures
from graphaccel.runtime.execution.executor import Executor


def captures_in(model: nn.Module) -> Captures:
    """The captures of the model, by batch. Setting `steps` before the first batch spares one."""
    return _handle(model).compiler.captures


def executors_in(model: nn.Module) -> Collection[Executor]:
    """One for each program that has run a training step."""
    return _handle(model).session._executors.values()


def drop_buckets(model: nn.Module) -> None:
    """Free the memory that is kept for the gradients of the next step."""
    _handle(model).session._buckets._kept.clear()


def is_closed(model: nn.Module) -> bool:
    """Whether the proof of the first step is still to come, or has failed."""
    return _handle(model).gate.closed


def _handle(model: nn.Module) -> Any:
    return model.graphaccel
