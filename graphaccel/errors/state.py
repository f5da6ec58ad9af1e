"""Errors about Python state that a captured graph would freeze (1xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError
from graphaccel.errors.messages import Location, Message


@dataclass(kw_only=True, eq=False, repr=False)
class StateFrozen(GraphAccelError):
    """Python state that the forward depends on and a graph cannot follow. what: a sentence; note:
    what is wrong at `location`."""

    code = "GA106"
    what: str
    reason: str
    help_lines: tuple[str, ...]
    location: Location | None = None
    note: str = ""

    def message(self) -> Message:
        return Message(
            self.what, self.location, note=self.note, why=self.reason, help=self.help_lines
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DrawnOutside(GraphAccelError):
    """The forward draws random numbers from another generator than torch's default one.

    generator: e.g. "Python's `random`". help_line: what to write instead, if it is one of torch's.
    """

    code = "GA107"
    module: str
    generator: str
    location: Location | None = None
    help_line: str = ""

    def message(self) -> Message:
        lines = (
            "draw with torch, and choose without a branch:  "
            "x = torch.where(torch.rand((), device=x.device) < 0.5, a, b)",
            "or draw in the script, before each step, and read that in the forward:  "
            "model.drawn = random.random()",
        )
        return Message(
            f"cannot capture `{self.module}`: it draws from {self.generator}",
            self.location,
            note="a graph would keep the number that was drawn at capture",
            why="only torch's default generator is drawn from anew in every step, and is the same "
            "on every rank",
            help=(self.help_line,) if self.help_line else lines,
        )
