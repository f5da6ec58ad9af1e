"""Base class of all errors: one class per code, with readable fields and a text.

The text names the user's own source line where one is known, says why, and every `help:` line can
be pasted. The fields stay on the exception, so that notebooks and CI need not parse the text.
The long form of each code is the page `docs/errors/<code>.md`, printed by `graphaccel explain`.

All fields are keyword arguments. Sizes are bytes, unless a field says otherwise. Nothing here
imports torch, and every error survives pickling (it may travel between processes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import ClassVar

from graphaccel.errors.messages import Message, format_bytes

WRITTEN: ContextVar[Callable[[str], str]] = ContextVar(
    "text with a library's own lines", default=str
)
"""An error's text → the same with what to type as a script of another library writes it."""


def named_module(module: str) -> str:
    return f"`{module}`" if module else "the model"


def listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def sized(parts: Mapping[str, int]) -> str:
    return " · ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())


@dataclass(eq=False, repr=False)
class GraphAccelError(Exception):
    """Base of all errors. `str(error)` is the full text; `error.code` its code.

    A subclass is a dataclass: its fields are the keyword arguments, `message()` builds the text.
    """

    code: ClassVar[str] = "GA000"

    def __init_subclass__(cls) -> None:
        cls.__module__ = "graphaccel.errors"  # the name by which users import it, in tracebacks too

    def __post_init__(self) -> None:
        super().__init__(WRITTEN.get()(self.message().render(self.code)))

    def message(self) -> Message:
        """The parts of the text; each subclass implements it."""
        return Message("graphaccel failed")

    def __reduce__(self) -> tuple[object, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuild, (type(self), values)


def _rebuild(cls: type[GraphAccelError], values: dict[str, object]) -> GraphAccelError:
    return cls(**values)
