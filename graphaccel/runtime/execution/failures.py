"""Tells the other ranks what a rank raised in a step: they would see a lost connection alone.

The first failure of a job is kept in the store of the process group, as a text, until the rank that
raised it runs a step again (a script may catch the error).
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

from graphaccel.compat.torch.distributed import default_store
from graphaccel.runtime.execution.lost_rank import first_line

_KEY = "graphaccel/failed"
_LONGEST = 300
_CONNECTS, _ANSWERS = 1.0, 3.0


class Failures:
    """What this rank raised, for the others. Every method is silent where the store is gone."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks, self._published = rank, ranks, False

    def publish(self, error: Exception) -> None:
        """Keep what this rank raised, unless another rank failed before."""
        if self._ranks == 1:
            return
        lines = str(error).strip().splitlines() or [""]
        text = f"rank {self._rank} raised {type(error).__name__}: {lines[0]}"[:_LONGEST]
        try:
            kept = _answering_store().compare_set(_KEY, "", text)
        except (RuntimeError, ValueError):
            return
        self._published = kept.decode() == text

    def forget(self) -> None:
        """Remove what this rank published: it goes on."""
        if self._published:
            self._published = False
            try:
                _answering_store().delete_key(_KEY)
            except (RuntimeError, ValueError):
                return


def cause_of(error: RuntimeError) -> str:
    """What another rank raised, where it is known, else the first line of the backend's error."""
    try:
        store = _answering_store()
    except (RuntimeError, ValueError):  # the store went with its rank; there is no process group
        return first_line(error)
    answer: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):
            if store.check([_KEY]):
                answer.append(store.get(_KEY).decode())

    # Where the rank that has the store is stopped, torch waits for its answer without a limit.
    asking = threading.Thread(target=ask, name="graphaccel-cause", daemon=True)
    asking.start()
    asking.join(_ANSWERS)
    return answer[0] if answer else first_line(error)


def _answering_store() -> Any:
    """The store of the process group. Raises ValueError where it went with its rank: torch warns of
    that with a stack of its library."""
    store = default_store()
    inner = store
    while (below := getattr(inner, "underlying_store", None)) is not None:
        inner = below
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if host and port:
        try:
            socket.create_connection((host, port), _CONNECTS).close()
        except OSError as error:
            raise ValueError("the store is gone") from error
    return store
