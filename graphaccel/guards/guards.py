"""Checks whether the Python values that a capture depends on are unchanged.

A check compares the object at each place by identity, and its contents only where that differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.compat.torch.tensors import version
from graphaccel.guards.place import Place
from graphaccel.guards.tokens import BUFFERS, MISSING, token_of, values_of

_READ_AGAIN = ("attribute", "call", "cell", "context", "proxy")
"""How places are read whose holders are no dicts or lists."""


@dataclass(frozen=True)
class Change:
    """A place whose value changed. before, now: as text."""

    place: Place
    before: str
    now: str


class Guards:
    """The values that one capture depends on.

    find: walks the live model, name → place. recorded: name → token, as captured. numbers: names of
    places that are inputs of its graph, in their order. written: names of places that the forward
    itself writes. tensors: name of a tensor's place → name of the constant in its graph that holds
    its values. filled: name of a place that the first forward fills for later ones → token before
    and behind it.
    """

    def __init__(
        self,
        find: Callable[[], dict[str, Place]],
        recorded: Mapping[str, Any],
        numbers: Sequence[str] = (),
        written: Collection[str] = (),
        tensors: Mapping[str, str] | None = None,
        filled: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        self._find, self.numbers, self._filled = find, tuple(numbers), dict(filled or {})
        self._free = frozenset((*numbers, *written)) - self._filled.keys()
        other = self._free | self._filled.keys()
        self.recorded = {n: t for n, t in recorded.items() if n not in other}
        self.tensors = dict(tensors or {})
        self._contents: dict[str, torch.Tensor] = {}
        self._last: _Last | None = None
        self._changes: tuple[Change, ...] = ()
        self._dtype = torch.get_default_dtype()

    def hold(self) -> bool:
        """Whether nothing changed."""
        if torch.get_default_dtype() is not self._dtype:
            self._changes = (self._other_dtype(),)
            return False
        if self._last is not None and self._last.same():
            return True
        result = self._find()
        self._changes = tuple(self._compared(result))
        if self._changes:
            self._last = None
            return False
        self._last = _Last(result, self._free, self.tensors, self.numbers)
        return True

    def _other_dtype(self) -> Change:
        """The change of torch's default dtype, which tensors created without a dtype get."""
        name, now = "torch.get_default_dtype()", torch.get_default_dtype()
        return Change(Place(name, {}, name, "dict", now), str(self._dtype), str(now))

    def numbers_now(self) -> tuple[float, ...]:
        """The current values of the numbers that are inputs; after `hold` returned True."""
        assert self._last is not None
        return tuple(float(current(place)) for place in self._last.numbers)

    def tensors_now(self) -> dict[str, torch.Tensor]:
        """Constant of the graph → the tensor whose values it holds; after `hold` returned True."""
        assert self._last is not None
        return {self.tensors[p.name]: current(p) for p in self._last.tensors}

    def changes(self) -> tuple[Change, ...]:
        """What differed when `hold` last returned False."""
        return self._changes

    def _compared(self, result: Mapping[str, Place]) -> list[Change]:
        changes = []
        for name in self.numbers:
            place = result.get(name)
            if place is None or not place.is_number:
                now = MISSING if place is None else place.token
                gone = place or Place(name, {}, name, "dict", MISSING)
                changes.append(Change(gone, "a number", token_text(now)))
        for name, before in self.recorded.items():
            place = result.get(name)
            now = MISSING if place is None else place.token
            if not _equal(now, before):
                if place is None:
                    place = Place(name, {}, name, "dict", MISSING)
                changes.append(Change(place, token_text(before), token_text(now)))
            elif place is not None and not self._same_content(place):
                changes.append(Change(place, "a tensor", "a tensor with other values"))
        return [*changes, *self._filled_otherwise(result)]

    def _filled_otherwise(self, result: Mapping[str, Place]) -> Iterator[Change]:
        for name, tokens in self._filled.items():
            place = result.get(name, Place(name, {}, name, "dict", MISSING))
            if not any(_equal(place.token, token) for token in tokens):
                yield Change(place, token_text(tokens[-1]), token_text(place.token))

    def watch_content(self, result: Mapping[str, Place]) -> None:
        """Also compare the values of tensors that no constant of the graph holds."""
        for name, place in result.items():
            if isinstance(place.value, torch.Tensor) and name in self.recorded:
                has_values = not (isinstance(place.value, FakeTensor) or place.value.is_meta)
                if name not in self.tensors and has_values:
                    self._contents[name] = place.value.detach().clone()

    def _same_content(self, place: Place) -> bool:
        known = self._contents.get(place.name)
        return known is None or torch.equal(known, place.value)


class _Last:
    """The objects at each place when all was as recorded."""

    def __init__(
        self,
        result: Mapping[str, Place],
        free: Collection[str],
        tensors: Collection[str],
        numbers: Sequence[str],
    ) -> None:
        self.numbers = [result[name] for name in numbers]
        self.tensors = [result[name] for name in tensors if name in result]
        self.tokens = [(place, place.token) for place in self.tensors]
        self.dicts: list[tuple[Any, Any, Any]] = []
        self.sizes: list[tuple[Any, int]] = []
        self.lists: list[tuple[Sequence[Any], tuple[Any, ...]]] = []
        self.others: list[tuple[Place, Any]] = []
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self.written: list[tuple[Any, Any]] = []
        self.values: list[tuple[Place, int]] = []
        seen: set[int] = set()
        partial = {id(p.holder) for n, p in result.items() if n in free and p.how == "item"}
        for name, place in result.items():
            if name in free or name in tensors:
                continue
            value = place.value
            if place.how == "values":
                here = isinstance(value, torch.Tensor)
                self.values.append((place, version(value) if here else -1))
                continue
            if place.how == "dict":
                self.dicts.append((place.holder, place.key, value))
            elif place.how in _READ_AGAIN or id(place.holder) in partial:
                self.others.append((place, value))
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, (list, deque)) and id(value) not in partial:
                self.lists.append((value, tuple(value)))
            elif isinstance(value, dict):
                self.sizes.append((value, len(value)))
            elif isinstance(value, torch.Tensor):
                self.versions.append((value, version(value)))
            elif isinstance(value, np.ndarray):
                self.arrays.append((value, value.copy()))
            elif isinstance(value, (set, bytearray, *BUFFERS)):
                self.written.append((value, token_of(value)))

    def same(self) -> bool:
        """Whether the same objects are still there."""
        for holder, key, value in self.dicts:
            now = holder.get(key, MISSING)
            if now is not value and not _interchangeable(now, value):
                return False
        for holder, size in self.sizes:
            if len(holder) != size:
                return False
        for items, copy in self.lists:
            if len(items) != len(copy) or any(map(is_not, items, copy)):
                return False
        for place, value in self.others:
            now = current(place)
            if now is not value and not _interchangeable(now, value):
                return False
        for tensor, number in self.versions:
            if version(tensor) != number:
                return False
        for place in self.numbers:
            if type(current(place)) not in (int, float):
                return False
        for place, token in self.tokens:
            now = current(place)
            if now is not place.value and token_of(now) != token:
                return False
        if any(token_of(now) != token for now, token in self.written):
            return False
        if not all(_has_values(place, number) for place, number in self.values):
            return False
        return all(np.array_equal(now, copy) for now, copy in self.arrays)


def current(place: Place) -> Any:
    """The current value at a place; MISSING where there is none."""
    try:
        if place.how == "cell":
            return place.holder.cell_contents
        if place.how == "attribute":
            return getattr(place.holder, place.key, MISSING)
        if place.how == "context":
            return place.holder.get(MISSING)
        if place.how == "call":
            return place.holder()
        return place.holder[place.key]
    except (KeyError, IndexError, ValueError):
        return MISSING


def _has_values(place: Place, number: int) -> bool:
    """Whether a tensor has the values that it had. number: how often it was written to until then:
    a look at its values may wait for a device."""
    now = current(place)
    if type(now) is not torch.Tensor:  # on another process
        return number < 0
    same = now is place.value and version(now) == number
    return same or values_of(now) == place.token


def _interchangeable(now: Any, before: Any) -> bool:
    return type(now) is type(before) and isinstance(now, (int, float, str)) and now == before


def _equal(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and now == before)


def token_text(token: Any) -> str:
    """A token as text, without addresses."""
    if token is MISSING:
        return "not there"
    if isinstance(token, tuple) and len(token) == 2 and isinstance(token[0], type):
        return str(token[1]) if token[1] == "nan" else repr(token[1])
    if isinstance(token, CodeType):
        return f"{token.co_name} of {Path(token.co_filename).name}:{token.co_firstlineno}"
    name = getattr(token, "__qualname__", None)
    return name if name is not None else repr(token)
