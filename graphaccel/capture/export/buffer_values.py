"""Values of small buffers that a forward asks for: `if self.initialized.item() == 0:`.

A graph has one branch of such an `if`. It is captured with the value that the buffer has now, and
serves as long as the buffer has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphaccel.capture.export.known_values import Answers
from graphaccel.guards.place import Place

_MOST = 16
"""Elements of a buffer from which on its values are no flags."""


@dataclass
class BufferValues:
    """values: name → value that a small buffer has now. asked: names of those that the forward
    asked for."""

    values: Mapping[str, torch.Tensor]
    asked: set[str]


_VALUES: ContextVar[BufferValues | None] = ContextVar("buffer values", default=None)


@contextmanager
def buffers_of(model: nn.Module, asked: dict[str, torch.Tensor]) -> Iterator[None]:
    """In this context forwards of copies of a model get the values that its small buffers have.

    asked: gets those that they ask for, by name; of a buffer that is on another process now, it has
    the value that it had here.
    """
    held = dict(model.named_buffers(remove_duplicate=False))
    values = {name: buffer.detach() for name, buffer in held.items() if is_readable(buffer)}
    known = BufferValues(asked | values, set())
    token = _VALUES.set(known)
    try:
        yield
    finally:
        _VALUES.reset(token)
        asked |= {name: known.values[name].clone() for name in known.asked}


def is_readable(buffer: torch.Tensor) -> bool:
    """Whether a buffer is small, and its values are on this process."""
    return type(buffer) is torch.Tensor and not buffer.is_meta and 0 < buffer.numel() <= _MOST


def asked_buffers(
    model: nn.Module, names: Iterable[str], elsewhere: Mapping[str, Any]
) -> dict[str, Place]:
    """Name → place, of buffers whose values a forward asks for. elsewhere: what one is compared by
    whose values are on another process, which has not written to it."""
    results = {}
    for name in names:
        path, _, key = name.rpartition(".")
        holder = model.get_submodule(path)._buffers
        buffer = holder.get(key)
        if buffer is not None and is_readable(buffer):
            results[name] = Place(name, holder, key, "values", buffer)
        elif buffer is not None and name in elsewhere:
            results[name] = Place(name, holder, key, "values", elsewhere[name])
    return results


def buffers_answer(model: nn.Module) -> Answers:
    """A context for one forward of a copy of a model without data."""
    values = _VALUES.get()
    return (
        Answers(model, {}, set()) if values is None else Answers(model, values.values, values.asked)
    )


def asked_now() -> frozenset[str]:
    """The names of the buffers that forwards have asked for in this context."""
    values = _VALUES.get()
    return frozenset(() if values is None else values.asked)
