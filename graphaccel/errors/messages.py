"""Lays out an error's text: a sentence, the user's source line, the reason, what to type."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class Location:
    """A place in the user's source.

    text: the source line; read from `file` when None and the file can be read.
    start, end: columns of the offending part in `text`, from 0, end excluded; the whole line
    without its indentation when None or outside of it.
    """

    file: str
    line: int
    text: str | None = None
    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        inside = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        return f"{self.file if inside.startswith('..') else inside}:{self.line}"

    def lines(self, note: str) -> list[str]:
        """The arrow line, then the source line underlined with `note` behind the carets."""
        text = linecache.getline(self.file, self.line) if self.text is None else self.text
        text = text.rstrip().expandtabs(4)
        head = [f"  --> {self}"]
        if not text.strip():
            return [*head, f"   {note}"] if note else head
        start = len(text) - len(text.lstrip())
        end = len(text)
        if self.start is not None and self.end is not None and self.start < self.end <= end:
            start, end = self.start, self.end
        number = f"{self.line:>5} | "
        carets = " " * start + "^" * (end - start)
        return [*head, number + text, f"{' ' * 5} | {carets} {note}".rstrip()]


_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = os.path.dirname(linecache.__file__) + os.sep


def line_of_script() -> Location | None:
    """The innermost line on the call stack outside of graphaccel, torch and installed code."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_of_script(frame):
            return Location(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def is_of_script(frame: FrameType) -> bool:
    """Whether a frame is of code outside of graphaccel, torch and installed code."""
    file = frame.f_code.co_filename
    return not file.startswith((_OWN, _PYTHON, "<")) and "/site-packages/" not in file


@dataclass(frozen=True)
class Message:
    """The parts of an error's text, in the order in which they are printed."""

    sentence: str
    location: Location | None = None
    note: str = ""
    details: tuple[str, ...] = ()
    why: str = ""
    help: tuple[str, ...] = ()
    others: tuple[Location, ...] = ()

    def render(self, code: str) -> str:
        """The whole text, without a newline at its end."""
        lines = [f"error[{code}]: {self.sentence}"]
        if self.location is not None:
            lines += self.location.lines(self.note)
        lines += [f"  {line}" for line in self.details]
        if self.why:
            lines.append(f"  why:  {self.why}")
        lines += [f"  help: {line}" for line in self.help]
        if self.others:
            plural = "place" if len(self.others) == 1 else "places"
            places = ", ".join(map(str, self.others))
            lines.append(f"  {len(self.others)} more {plural} like this: {places}")
        lines.append(f"  explain: graphaccel explain {code}")
        return "\n".join(lines)


def format_bytes(count: int) -> str:
    """`count` bytes to one decimal in GiB, or in MiB or KiB where that would read 0.0."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size / 10:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def columns(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Rows as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return tuple(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
