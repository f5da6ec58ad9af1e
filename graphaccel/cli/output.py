"""Writes the report and the files that a command was asked for."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

from graphaccel.errors import GraphMisuse


@contextmanager
def report_alone() -> Iterator[TextIO]:
    """Meanwhile standard output is the report's: gives the stream for it.

    What the user's code prints, also from C and by processes that it starts, goes to standard
    error. Raises GraphMisuse (GA407) where the report can not be written, e.g. on a full disk.
    """
    before = sys.stdout or io.StringIO()  # none where the caller closed it
    try:
        descriptor = before.fileno()
    except (OSError, ValueError):  # a stream in memory
        with redirect_stdout(sys.stderr):
            yield before
        return
    before.flush()
    kept = os.dup(descriptor)
    os.dup2(2, descriptor)
    try:
        with flushed(), redirect_stdout(sys.stderr):
            with open(kept, "w", encoding=before.encoding, closefd=False) as out:
                yield out
    finally:
        sys.stderr.flush()
        os.dup2(kept, descriptor)
        os.close(kept)


@contextmanager
def flushed() -> Iterator[None]:
    """Around printing to standard output, which is written when this ends.

    Raises GraphMisuse (GA407) where it is a file on a full disk. BrokenPipeError is left to the
    caller: the reader has seen enough, as `head` has.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        drop_output()
        raise GraphMisuse(
            what="standard output can not be written: No space left on device",
            help_line="make room, or send it elsewhere",
        ) from None


def drop_output() -> None:
    """Send what is still to be written at exit nowhere: writing it failed."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writing a file. Raises GraphMisuse (GA407) where it fails, e.g. on a full disk."""
    try:
        yield
    except OSError as error:
        raise GraphMisuse(
            what=f"`{path}` can not be written: {error.strerror or error}",
            help_line="make room, or name a file elsewhere",
        ) from None
