"""Says an error that all ranks of a machine have once: its first rank does, where it has the same.

What a rank can not do with the files it is given, or a plan that does not fit, is an error of each.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from graphaccel.errors import GraphAccelError
from graphaccel.runtime.launch import STOPPED_FILE

_SECONDS, _PAUSE = 3.0, 0.05


def said_by_first(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the first rank of this machine says this error, so that this one need not.

    Waits some seconds for it: a rank that fails alone is not long in saying so. The launcher stops
    the others when one ends, also while they wait here.
    """
    stopped, rank = environment.get(STOPPED_FILE), environment.get("LOCAL_RANK")
    if stopped is None or rank is None or not Path(stopped).parent.is_dir():  # no rank, or alone
        return False
    file = Path(stopped).with_name("error")
    if rank == "0":
        part = file.with_suffix(".part")
        part.write_text(text)
        part.replace(file)
        return False
    end = time.monotonic() + _SECONDS
    while not file.exists() and time.monotonic() < end:
        time.sleep(_PAUSE)
    return file.exists() and file.read_text() == text


def report_errors_once() -> None:
    """From now on end this process without a traceback for an error that the first rank says."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (isinstance(error, GraphAccelError) and said_by_first(str(error))):
            before(kind, error, trace)

    sys.excepthook = hook
