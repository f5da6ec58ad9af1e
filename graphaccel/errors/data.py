"""Errors about training data (4xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError
from graphaccel.errors.messages import Message


@dataclass(kw_only=True, eq=False, repr=False)
class BadData(GraphAccelError):
    """A file of training data, or a tokenizer, that can not be used. place: the file, with the
    number of the line where there is one."""

    code = "GA417"
    place: str
    reason: str
    help_line: str = ""

    def message(self) -> Message:
        return Message(
            f"`{self.place}` can not be used as training data",
            why=self.reason,
            help=(self.help_line,) if self.help_line else (),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BadTraining(GraphAccelError):
    """Settings of `graphaccel train` that can not be followed. what: a whole sentence."""

    code = "GA418"
    what: str
    why: str = ""
    help_line: str = ""

    def message(self) -> Message:
        return Message(self.what, why=self.why, help=(self.help_line,) if self.help_line else ())
