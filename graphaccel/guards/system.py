"""What code asks of files and of the operating system, which says something else later."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from graphaccel.errors.messages import Location

OPENS = "opens a file"
ASKS_FILES = "asks the file system"
ASKS_OTHERS = "asks another process"

_FILE_SYSTEM = frozenset(
    "access fstat getxattr listdir listxattr lstat pathconf readlink scandir stat statvfs "
    "_path_exists _path_isdir _path_isfile _path_lexists".split()
)
_OTHERS = frozenset({"_posixsubprocess", "_socket", "_winapi"})
_BETWEEN = ("fnmatch", "genericpath", "glob", "ntpath", "os", "pathlib", "posixpath", "shutil")
"""Modules of Python's that ask the file system for who called them."""
_RUNS = ("socket", "subprocess")


@dataclass(frozen=True)
class Question:
    """A line of the user's that asks for what is outside of the process, or changes it there.

    what: what it does.
    """

    what: str
    line: Location


def asked_of_system(
    frame: FrameType, module: str, function: Callable[..., Any]
) -> tuple[FrameType, str] | None:
    """Who asks, and how, in a call of a builtin function; None for other functions.

    frame: the caller. Python asks for its own purposes, too, as to import a module: who asks is
    then a frame of Python's.
    """
    if function is io.open:
        return caller_of(frame, ("pathlib",)), OPENS
    if module in ("posix", "nt") and function.__name__ in _FILE_SYSTEM:
        return caller_of(frame, _BETWEEN), ASKS_FILES
    if module in _OTHERS:
        return caller_of(frame, _RUNS), ASKS_OTHERS
    return None


def caller_of(frame: FrameType, between: tuple[str, ...]) -> FrameType:
    """The nearest frame that belongs to none of these modules."""
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in between:
            break
        frame = frame.f_back
    return frame
