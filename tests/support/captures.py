"""Captures of zoo models, made once for all processes of a run of the tests.

A capture takes seconds. The process that makes one leaves it in a folder that lives as long as the
run; the others read it, as ranks read what one of them captured (`capture.transport`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.export import LossFn
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.transport import packed, unpacked
from graphaccel.compiler import captures as kept
from graphaccel.runtime.broadcast import depends_on

FOLDER = "GRAPHACCEL_TEST_CAPTURES"
"""Environment variable with the folder; where it is not set, everything is captured anew."""


def captured_once(name: str, make: Callable[[], StepGraph]) -> StepGraph:
    """The capture called `name`, by `make` if no process has made it yet."""
    steps: dict[Any, StepGraph] = {}
    read_captures(name, steps)
    if not steps:
        steps[""] = make()
        write_captures(name, steps)
    return steps[""]


@contextmanager
def captures_of(name: str) -> Iterator[None]:
    """Meanwhile compilers capture what looks alike once for all processes; `@captures_of(name)`
    above a job does so while it runs.

    Alike are models that print alike, with tensors alike, called alike. name: of the tests whose
    models then also compute alike.
    """
    real = kept.capture

    def capture(
        module: nn.Module, batch: Batch, loss_fn: LossFn = None, **settings: Any
    ) -> StepGraph:
        given = {key: value for key, value in settings.items() if not callable(value)}
        seen = batch.signature(), str(module), module.training, sorted(given.items())
        told = depends_on(module, seen, loss_fn)
        return captured_once(f"{name} {told}", lambda: real(module, batch, loss_fn, **settings))

    with patch.object(kept, "capture", capture):
        yield


def read_captures(name: str, captures: dict[Any, StepGraph]) -> None:
    """Put what was kept under `name` into `captures`."""
    file = _file(name)
    if file is None or not file.exists():
        return
    for key, data in pickle.loads(file.read_bytes()):
        step = unpacked(data)
        if step is not None:
            captures[key] = step


def write_captures(name: str, captures: Mapping[Any, StepGraph]) -> None:
    """Keep `captures` under `name`, unless some are kept there already."""
    file = _file(name)
    if file is None or file.exists() or not captures:
        return
    new = file.with_suffix(f".{os.getpid()}")
    new.write_bytes(pickle.dumps([(key, packed(step)) for key, step in captures.items()]))
    new.replace(file)  # whole or not at all: others may be reading


def _file(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder) / hashlib.sha256(name.encode()).hexdigest() if folder else None
