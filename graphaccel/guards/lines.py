"""Finds the user's source line that reads or writes a name, and the one that calls the model."""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from graphaccel.errors.messages import Location

Read = Location | tuple[CodeType, str] | None
"""A line, or the code object that contains it and the name to search for."""


def location(read: Read, *, writes: bool = False) -> Location | None:
    """The line, with its columns where Python knows them. writes: the first that writes the name,
    if any does."""
    if read is None or isinstance(read, Location):
        return read
    code, name = read
    results = [i for i in dis.get_instructions(code) if i.argval == name]
    results = [i for i in results if writes and i.opname.startswith("STORE")] or results
    if not results:
        return Location(code.co_filename, code.co_firstlineno)
    at = getattr(results[0], "positions", None)  # Python 3.11
    if at is None or at.lineno is None:
        return Location(code.co_filename, results[0].starts_line or code.co_firstlineno)
    return Location(code.co_filename, at.lineno)


def writes_name(read: Read) -> bool:
    """Whether the code that reads a name also writes it."""
    if read is None or isinstance(read, Location):
        return False
    code, name = read
    return any(
        i.argval == name and i.opname.startswith("STORE") for i in dis.get_instructions(code)
    )


def call_as_written(caller: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The expression with which the script called the model, where a function of file `caller` is
    on the stack for it and Python knows the columns; else the form of such a call.

    args, kwargs: of the call.
    """
    below: FrameType | None = sys._getframe(1)
    frame: FrameType | None = None
    while below is not None:
        if below.f_code.co_filename.endswith(caller):
            frame = below.f_back
        below = below.f_back
    written = "" if frame is None or "/site-packages/" in frame.f_code.co_filename else _at(frame)
    if written:
        return written
    if args and kwargs:
        return "model(*args, **kwargs)"
    return "model(**batch)" if kwargs else "model(*batch)" if len(args) > 1 else "model(batch)"


def _at(frame: FrameType) -> str:
    """The source of the expression that a frame is at; "" before Python 3.11."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return ""
    first, last, start, end = next(islice(positions(), frame.f_lasti // 2, None))
    if None in (first, last, start, end):
        return ""
    lines = [
        linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.unparse(ast.parse(b"".join(lines).decode()))
    except SyntaxError:
        return ""
