"""Captures of zoo models, made once for all processes of a run of the tests.

A capture takes seconds. The process that makes one leaves it in a folder that lives as long as the
run; the others read it, as ranks read what one of them captured (`capture.transport`). A process
keeps the latest it has read, packed or received: reading one takes half a second, and passes store
in a capture what plans with the same request share.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.export import LossFn
from graphaccel.capture.state.observe import Observed
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.transport import packed, unpacked
from graphaccel.compiler import captures as kept
from graphaccel.runtime import broadcast
from graphaccel.runtime.broadcast import depends_on

FOLDER = "GRAPHACCEL_TEST_CAPTURES"
"""Environment variable with the folder; where it is not set, everything is captured anew."""
_LATEST = 8
"""Captures that a process keeps, with what passes derived from them."""


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

    with patch.object(kept, "capture", capture), packed_once():
        yield


@contextmanager
def packed_once() -> Iterator[None]:
    """Meanwhile captures that ranks send are packed and unpacked once in this process."""
    with patch.object(broadcast, "packed", _packed), patch.object(broadcast, "unpacked", _unpacked):
        yield


@contextmanager
def observed_once(name: str) -> Iterator[None]:
    """Meanwhile compilers of this process run a forward once to see which Python state it reads,
    not once for each model. name: of models without state that changes, which are all alike; tests
    of guards do without."""
    real, known = kept.observe, _observed(name)

    def observe(fresh: Any, batch: Batch, loss_fn: LossFn, many: int) -> Observed:
        signature = batch.signature()
        if signature not in known:
            known[signature] = real(fresh, batch, loss_fn, many)
        return known[signature]

    with patch.object(kept, "observe", observe):
        yield


@cache
def _observed(name: str) -> dict[Any, Observed]:
    return {}


def read_captures(name: str, captures: dict[Any, StepGraph]) -> None:
    """Put what was kept under `name` into `captures`."""
    file = _file(name)
    if file is None or not file.exists():
        return
    captures.update(_read(file))


def write_captures(name: str, captures: Mapping[Any, StepGraph]) -> None:
    """Keep `captures` under `name`, unless some are kept there already."""
    file = _file(name)
    if file is None or file.exists() or not captures:
        return
    new = file.with_suffix(f".{os.getpid()}")
    new.write_bytes(pickle.dumps([(key, _packed(step)) for key, step in captures.items()]))
    new.replace(file)  # whole or not at all: others may be reading


@lru_cache(maxsize=_LATEST)
def _read(file: Path) -> dict[Any, StepGraph]:
    """The captures of a file, which never changes once it is there."""
    found = {key: unpacked(data) for key, data in pickle.loads(file.read_bytes())}
    return {key: step for key, step in found.items() if step is not None}


@dataclass(frozen=True, eq=False)
class _SameGraph:
    """A capture as a key: equal to one with the same graph object and names of its constants."""

    step: StepGraph

    def __hash__(self) -> int:
        return id(self.step.graph)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SameGraph) or other.step.graph is not self.step.graph:
            return False
        return dict(other.step.forward.attributes) == dict(self.step.forward.attributes)


def _packed(step: StepGraph) -> bytes:
    return _packed_once(_SameGraph(step))


@lru_cache(maxsize=_LATEST)
def _packed_once(same: _SameGraph) -> bytes:
    return packed(same.step)


@lru_cache(maxsize=_LATEST)
def _unpacked(data: bytes) -> StepGraph | None:
    return unpacked(data)


def _file(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder) / hashlib.sha256(name.encode()).hexdigest() if folder else None
