"""What a forward prints, logs and writes to files while it is captured: it is dropped, and said.

A step is a graph, which does none of it.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from graphaccel.guards.reads import is_library, line_of
from graphaccel.guards.system import OPENS, Question, caller_of

PRINTS = "prints"
LOGS = "logs"
WRITES = "writes to a file"


@contextmanager
def output_dropped(note: Callable[[Question], None] = lambda _: None) -> Iterator[None]:
    """In this context the user's code prints, logs and writes nowhere. note: called with each of
    these, and with each file that is opened to be read; unless another such context is around."""
    if builtins.print.__module__ == __name__:
        yield
        return
    opened, printed = _open(note), _print(note)
    with (
        patch.object(builtins, "open", opened),
        patch.object(io, "open", opened),
        patch.object(builtins, "print", printed),
        patch.object(logging.Logger, "handle", _handle(note)),
    ):
        yield


def effect_text(kind: type, effect: Question) -> str:
    """The line that says that steps do without an effect of the forward of this class."""
    place = f"{Path(effect.line.file).name}:{effect.line.line}"
    return f"{kind.__name__}.forward {effect.what} ({place}): the graph of a step does not"


def _asked(what: str, depth: int, between: tuple[str, ...]) -> Question | None:
    """Who is the user's caller, so many frames above; None for a caller that is not the user's."""
    frame = caller_of(sys._getframe(depth), between)
    line = None if is_library(frame.f_code.co_filename) else line_of(frame)
    return None if line is None else Question(what, line)


def _open(note: Callable[[Question], None]) -> Callable[..., Any]:
    own = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = not {"r", "+"} & set(mode)
        asked = _asked(WRITES if writes else OPENS, 2, ("pathlib",))
        if asked is None:
            return own(file, mode, *args, **kwargs)
        note(asked)
        if not writes:
            return own(file, mode, *args, **kwargs)
        return own(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    return opened


def _print(note: Callable[[Question], None]) -> Callable[..., None]:
    own = builtins.print

    def printed(*args: Any, **kwargs: Any) -> None:
        asked = _asked(PRINTS, 2, ())
        if asked is None:
            own(*args, **kwargs)
        else:
            note(asked)

    return printed


def _handle(note: Callable[[Question], None]) -> Callable[..., None]:
    own = logging.Logger.handle

    def handled(self: logging.Logger, record: logging.LogRecord) -> None:
        asked = _asked(LOGS, 2, ("logging", "graphaccel"))
        if asked is None:
            own(self, record)
        else:
            note(asked)

    return handled
