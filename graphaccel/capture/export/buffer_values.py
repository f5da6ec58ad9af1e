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
from torch.overrides import TorchFunctionMode

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.modes import outside_modes
from graphaccel.compat.torch.tensors import version
from graphaccel.guards.place import Place

_MOST = 16
"""Elements of a buffer from which on its values are no flags."""
_ASKS = frozenset("item tolist __bool__ __int__ __float__ __index__ is_nonzero equal".split())
_COMPUTES = frozenset(
    "eq ne lt le gt ge any all sum max min amax amin abs getitem invert and or xor logical_not "
    "logical_and logical_or to bool int long float double detach clone view reshape squeeze "
    "unsqueeze flatten add radd sub rsub mul rmul mod remainder isfinite isnan isinf "
    "count_nonzero neg".split()
)
"""Functions that are computed of values, too: without a draw, and without a write."""


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


@contextmanager
def buffers_answer(model: nn.Module) -> Iterator[None]:
    """A context for one forward of a copy of a model without data."""
    values = _VALUES.get()
    if values is None or not values.values:
        yield
        return
    with _Answers(model, values):
        yield


@dataclass(frozen=True)
class _Known:
    """A tensor without data, its value, and the buffers that it is computed of, with how often each
    was written to."""

    tensor: torch.Tensor
    value: torch.Tensor
    sources: Mapping[str, tuple[torch.Tensor, int]]


class _Answers(TorchFunctionMode):
    """Answers what a forward asks of buffers that it has not written to."""

    def __init__(self, model: nn.Module, values: BufferValues) -> None:
        super().__init__()
        self._asked = values.asked
        self._known: dict[int, _Known] = {}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in values.values:
                source = {name: (buffer, version(buffer))}
                self._known[id(buffer)] = _Known(buffer, values.values[name], source)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = [self._known[id(t)] for t in tensors if id(t) in self._known]
        if not known:
            return func(*args, **kwargs)
        if len(known) < len(tensors) or not all(map(_is_current, known)):
            self._forget_written(name, kwargs, known)
            return func(*args, **kwargs)
        sources = {n: source for one in known for n, source in one.sources.items()}
        if name in _ASKS:
            self._asked.update(sources)
            return self._computed(func, args, kwargs)
        result = func(*args, **kwargs)
        reads = func is torch.Tensor.data.__get__  # type: ignore[attr-defined]
        if isinstance(result, torch.Tensor) and (reads or name.strip("_") in _COMPUTES):
            if not _writes(name, kwargs):
                value = self._computed(func, args, kwargs)
                self._known[id(result)] = _Known(result, value, sources)
        self._forget_written(name, kwargs, known)
        return result

    def _computed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        def value(x: Any) -> Any:
            return self._known[id(x)].value if isinstance(x, torch.Tensor) else x

        with outside_modes(), torch.no_grad():
            return func(*pytree.tree_map(value, args), **pytree.tree_map(value, kwargs))

    def _forget_written(self, name: str, kwargs: dict[str, Any], known: list[_Known]) -> None:
        if not _writes(name, kwargs):
            return
        gone = {source for one in known for source in one.sources}
        for key in [k for k, one in self._known.items() if not gone.isdisjoint(one.sources)]:
            del self._known[key]


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function may write to one of its tensors."""
    own = name.endswith("_") and not name.endswith("__")
    operator = name.startswith(("__i", "__setitem")) and name not in ("__invert__", "__iter__")
    return own or operator or "out" in kwargs or "norm" in name


def _is_current(known: _Known) -> bool:
    return all(version(tensor) == number for tensor, number in known.sources.values())
