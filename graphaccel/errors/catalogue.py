"""Errors about devices and clusters (6xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError, listed
from graphaccel.errors.messages import Message


@dataclass(kw_only=True, eq=False, repr=False)
class UnknownDevice(GraphAccelError):
    """A device name that is not in the catalogue. closest: names that are; known: all of them."""

    code = "GA601"
    name: str
    closest: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def message(self) -> Message:
        return Message(
            f"no device named `{self.name}` in the catalogue",
            help=tuple(f"did you mean:  --device {name}" for name in self.closest)
            or ((f"there are:  {listed(self.known)}",) if self.known else ()),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BadCluster(GraphAccelError):
    """An invalid description of devices and links. where: a file or an argument."""

    code = "GA602"
    where: str
    problems: tuple[str, ...]

    def message(self) -> Message:
        return Message(
            f"{self.where} describes no cluster",
            details=self.problems,
            why="times and memory are predicted from these figures",
            help=("start from a known device:  graphaccel plan FILE --devices N --device h100-80gb "
                  "--save-cluster cluster.json",),
        )  # fmt: skip
