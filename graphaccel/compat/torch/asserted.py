"""What checks ask of values while export traces: they pass.

torch.export follows `assert x`, without a message, and only where it is one jump in the code. An
`if` that does nothing but raise is the same check. The checks of `torch.distributions` are
assertions, too: `python -O` leaves them out.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.distributions import Distribution
from torch.fx.experimental.sym_node import SymNode

from graphaccel.compat.torch.export import DataDependentError

_NOTHING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "RESUME"})
_TESTS = frozenset({"TO_BOOL", "COMPARE_OP"})
"""Instructions that ask for a value from Python 3.12 on, before the jump that reads it."""
_ELSE = ("RETURN", "STORE", "DELETE", "FOR_ITER", "SEND", "YIELD", "IMPORT", "RERAISE", "POP_TOP")
"""How the names of instructions begin that do something else."""


@contextmanager
def assertions_passed(inside: tuple[str, ...]) -> Iterator[None]:
    """Meanwhile a value that depends on data is what lets a check pass: an `assert`, or an `if`
    that does nothing but raise.

    inside: folders of code that is not the user's.
    """
    own = SymNode.guard_bool

    def guarded(self: SymNode, file: str, line: int) -> bool:
        try:
            return own(self, file, line)
        except DataDependentError:
            answer = answer_of_check(inside)
            if answer is None:
                raise
            return answer

    with patch.object(SymNode, "guard_bool", guarded):
        yield


def answer_of_check(inside: tuple[str, ...]) -> bool | None:
    """What lets the check pass for which the nearest frame of the user's asks for a value; None
    where it asks for something else."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<", *inside)):
        frame = frame.f_back
    return None if frame is None else passing(frame)


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Meanwhile distributions do not check the values of their parameters and samples.

    What they say of it is as the code asked: it is an output where the distribution is one.
    """
    own = Distribution.__init__

    def built(self: Distribution, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.pop("validate_args", args[2] if args[2:] else None)
        own(self, *args[:2], **kwargs, validate_args=False)
        if asked is None:
            del self._validate_args
        else:
            self._validate_args = asked

    def validated(self: Distribution, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise ValueError("The value argument to log_prob must be a Tensor")

    with (
        patch.object(Distribution, "__init__", built),
        patch.object(Distribution, "_validate_sample", validated),
    ):
        yield


def passing(frame: FrameType) -> bool | None:
    """The value with which the check passes, or asks further, whose condition this frame tests;
    None in other code."""
    code = [i for i in dis.get_instructions(frame.f_code) if i.opname not in _NOTHING]
    rest = list(dropwhile(lambda i: i.offset < frame.f_lasti, code))
    if rest and rest[0].opname in _TESTS:
        rest = rest[1:]
    if len(rest) < 2 or "POP_JUMP" not in rest[0].opname or "_IF_" not in rest[0].opname:
        return None
    jumps_if = rest[0].opname.endswith("TRUE")
    if _raises(rest[1:]):
        return jumps_if
    target = list(dropwhile(lambda i: i.offset < rest[0].argval, code))
    return not jumps_if if _raises(target) else None


def _raises(code: list[dis.Instruction]) -> bool:
    """Whether code does nothing but to build an exception and to raise it, as an `assert` does
    where it fails, and an `if` that checks."""
    for instruction in code:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(_ELSE):
            return False
    return False
