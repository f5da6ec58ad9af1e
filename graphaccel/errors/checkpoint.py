"""Errors about checkpoints (4xx)."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError
from graphaccel.errors.messages import Message

_MOST = 10
"""Lines that one list of names takes at most in a text."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(kw_only=True, eq=False, repr=False)
class CheckpointNotSaved(GraphAccelError):
    """A checkpoint, or exported weights, could not be written. what: in words; cause: of the first
    rank that failed; newest: the path of the newest complete checkpoint, empty where there is none;
    call: what saves it once the cause is gone."""

    code = "GA412"
    what: str
    folder: str
    rank: int
    cause: str
    call: str
    newest: str = ""

    def message(self) -> Message:
        newest = (f"newest complete checkpoint: {self.newest}",) if self.newest else ()
        return Message(
            f"{self.what} could not be saved in `{self.folder}`",
            details=(f"rank {self.rank}: {self.cause}", *newest),
            why="it counts only when every rank has written its part of it",
            help=(f"{self._mend()}:  {self.call}",),
        )

    def _mend(self) -> str:
        if _says(self.cause, *_FULL):
            return "make room, or save it where there is some"
        if _says(self.cause, *_DENIED):
            return "make the folder writable, or save it in one that is"
        return "once the cause is gone, or in another folder"


@dataclass(kw_only=True, eq=False, repr=False)
class CheckpointDamaged(GraphAccelError):
    """A checkpoint or a file of weights that can not be read. before: the path of an older complete
    checkpoint, empty where there is none."""

    code = "GA413"
    path: str
    problems: tuple[str, ...]
    before: str = ""

    def message(self) -> Message:
        denied = any(_says(problem, *_DENIED) for problem in self.problems)
        why = "a file is missing, was cut off or changed after it was written, or is of another "
        why = "this process has no permission to read it" if denied else why + "format"
        mend = "make it readable" if denied else "copy it again from where it was saved"
        older = f"load the one before it:  graphaccel.load('{self.before}', model, optimizer)"
        return Message(
            f"`{self.path}` can not be loaded",
            details=_some(self.problems),
            why=why,
            help=(older if self.before else mend,),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CheckpointDiffers(GraphAccelError):
    """A checkpoint of another model or optimizer. Each line names a tensor, and its shape where it
    has one. weights: it has weights alone, and no manifest."""

    code = "GA414"
    path: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    weights: bool = False

    def message(self) -> Message:
        parts = (
            ("not in the checkpoint:", self.missing),
            ("only in the checkpoint:", self.unexpected),
            ("different in the checkpoint:", self.changed),
        )
        details = [line for head, names in parts if names for line in (head, *_indented(names))]
        return Message(
            f"`{self.path}` does not fit this model or optimizer",
            details=tuple(details),
            why="a part of it would silently keep the values that it has now",
            help=(
                "build the model that these weights are of; the error's missing, unexpected and "
                "changed list every tensor"
                if self.weights
                else "build the model and the optimizer as they were when it was saved; "
                "its manifest.json lists every tensor",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CheckpointUntrusted(GraphAccelError):
    """A pickle that names more than weights. named: the name that it would have called."""

    code = "GA415"
    path: str
    named: str

    def message(self) -> Message:
        return Message(
            f"`{self.path}` holds more than weights: it names `{self.named}`",
            why="a pickle runs what it names when it is read, so only tensors and plain values are "
            "read; nothing was run",
            help=(
                "if you trust its source, write the weights alone:  "
                "torch.save(torch.load('model.pt', weights_only=False).state_dict(), 'weights.pt')",
            ),
        )


def _says(cause: str, *numbers: int) -> bool:
    """Whether a cause in words is one of the system's errors."""
    return any(os.strerror(number) in cause for number in numbers)


def _some(lines: Sequence[str]) -> tuple[str, ...]:
    more = len(lines) - _MOST
    return (*lines[:_MOST], *([f"and {more} more"] if more > 0 else []))


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in _some(lines)]
