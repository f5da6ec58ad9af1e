"""Errors of compiled stages (9xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError
from graphaccel.messages import Message, columns

_OFF = "or without it:  graphaccel.optimize(model, optimizer, compile='off')"


@dataclass(kw_only=True, eq=False, repr=False)
class CompilerMissing(GraphAccelError):
    """Compiled stages were asked for on a CPU without a C++ compiler. asked: the pin."""

    code = "GA901"
    asked: str
    reason: str

    def message(self) -> Message:
        return Message(
            f"{self.asked} needs a C++ compiler, and none works here",
            why=self.reason,
            help=("install one, or name it:  CXX=/usr/bin/g++", _OFF),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CompileFailed(GraphAccelError):
    """Inductor raised while it compiled a part of a stage. first: the part's first call."""

    code = "GA902"
    stage: int
    phase: str
    calls: int
    first: str
    cause: str

    def message(self) -> Message:
        return Message(
            f"Inductor failed to compile the {self.phase} of stage {self.stage}",
            details=columns(
                (
                    ("part:", f"{self.calls} calls from {self.first} on"),
                    ("reported:", self.cause),
                )
            ),
            why="what Inductor can not compile is left to torch beforehand; this was not foreseen",
            help=(
                "run the graphs as they are:  graphaccel.optimize(model, optimizer, compile='off')",
                "to see more of it:  TORCH_LOGS=+inductor",
            ),
        )
