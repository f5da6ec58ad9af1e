"""Finds the user's source line that reads or writes a name."""

from __future__ import annotations

import dis
from types import CodeType

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
