"""Runs the saves of one model, one at a time: now, or in the background."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any

from torch import nn

from graphaccel.checkpoint.staging import Staging
from graphaccel.checkpoint.stopping import StopRequest
from graphaccel.checkpoint.together import Together, ranks_of
from graphaccel.checkpoint.writing import Job

_KEY = "_graphaccel_saver"


class Saver:
    """Belongs to a model, and is not copied or pickled with it."""

    def __init__(self, together: Together | None = None) -> None:
        self.together = Together() if together is None else together
        self.staging = Staging()
        self.stop = StopRequest()
        self._background: Together | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Saver:
        return Saver()

    def __reduce__(self) -> tuple[Any, ...]:
        return Saver, ()

    def together_in_background(self, model: nn.Module) -> Together:
        """The ranks, over a group of the background's own: training goes on to call collectives of
        the other one, in another order on each rank. Collective at the first call."""
        if self._background is None:
            self._background = ranks_of(model)
        return self._background

    def start(self, job: Job, folder: Path, number: int) -> None:
        """Write a checkpoint in the background."""

        def write() -> None:
            try:
                job.write(folder, number)
            except BaseException as error:
                self._error = error

        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=write, name="graphaccel-save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in the background is done; raises what it raised."""
        if self._thread is None:
            return
        self._thread.join()
        atexit.unregister(self._at_exit)
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _at_exit(self) -> None:
        """Let the last save complete; the process fails if it does."""
        try:
            self.wait()
        except BaseException as error:
            print(error, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exception here would leave the exit code 0


def saver_of(model: nn.Module, call: str = "") -> Saver:
    """The saver of a model. Collective at the first call for it, on the ranks that train it.

    call: what they do (`runtime.agreement`), where they have not compared that before. Raises
    BatchesDiffer (GA404) where some do something else.
    """
    saver = vars(model).get(_KEY)
    together = None if saver is None else saver.together
    if together is None or (together.group is None and _several()):
        handle = getattr(model, "graphaccel", None)
        if call and handle is not None:
            handle.agree(call)
        saver = vars(model)[_KEY] = Saver(ranks_of(model))
    return saver  # type: ignore[no-any-return]


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_world_size() > 1
