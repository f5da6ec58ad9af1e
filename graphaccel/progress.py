"""Prints progress lines of planning and compiling; on a terminal in colour, with a running clock.

NO_COLOR (https://no-color.org) and TERM=dumb are respected; off a terminal lines are plain text.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

log = logging.getLogger("graphaccel.planner")

_STYLES = {"proved": "green", "ready": "green", "not proved": "yellow", "left out": "yellow"}
"""Of phases whose line says how something ended; others are bold."""


def progress(phase: str, what: str, seconds: float) -> None:
    """Print `graphaccel: capture    4,812 ops   9.8 s` to stderr of rank 0.

    Without such lines a long compile looks like a hang.
    """
    log.info("%s: %s in %.2f s", phase, what, seconds)
    if _shown():
        name = f"{phase:<10}"
        line = f"graphaccel: {name} {what:<60} {seconds:6.1f} s"
        print_styled(line, {name: _STYLES.get(phase, "bold")}, sys.stderr)


@contextmanager
def running(phase: str) -> Iterator[None]:
    """Meanwhile a terminal shows `graphaccel: capture    0:00:12`; nothing of it remains."""
    if not (_shown() and _is_terminal(sys.stderr)):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    shown = Progress(
        TextColumn("graphaccel: {task.description:<10}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # what the model prints is not ours
        redirect_stderr=False,
    )
    with shown:
        shown.add_task(phase, total=None)
        yield


def print_styled(text: str, styles: dict[str, str], out: TextIO, end: str = "\n") -> None:
    """Print a text to `out`; on a terminal with parts of it in a style of rich's, each where it
    comes first."""
    if not _is_terminal(out) or os.environ.get("NO_COLOR"):
        print(text, file=out, end=end)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    for part, style in styles.items():
        begin = text.find(part)
        if begin >= 0:
            styled.stylize(style, begin, begin + len(part))
    Console(file=out, highlight=False).print(styled, soft_wrap=True, end=end)


def _shown() -> bool:
    return os.environ.get("RANK", "0") == "0" and os.environ.get("GRAPHACCEL_QUIET") != "1"


def _is_terminal(out: TextIO) -> bool:
    try:
        return out.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # it is closed
        return False
