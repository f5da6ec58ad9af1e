"""Writes the files that a command was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphaccel.errors import GraphMisuse


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
