"""Writes each call of a model as its first one was: the same inputs by position and by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Any

from graphaccel.capture.batch import ARGUMENTS, CallNumber


class CallForm:
    """The form of the calls of one model: `model(x, mask)` and `model(mask=mask, x=x)` are one call
    to Python, and one batch here."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        """forward: the model's, without `self`."""
        try:
            self._signature = inspect.signature(forward)
        except (TypeError, ValueError):  # a function without one
            self._signature = inspect.Signature()
        self._first: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._numbers: dict[tuple[str, ...], dict[str, Any]] = {}
        self._last: dict[str, Any] = {}
        self._changed: set[str] = set()
        self._fixed: set[str] = set()

    def with_numbers(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a `CallNumber` in the place of each int and float, except for those
        that can not be an input of a graph: each of their values has a capture of its own."""
        named = {f"args[{i}]": value for i, value in enumerate(args)} | dict(kwargs)
        numbers = {k: v for k, v in named.items() if type(v) in (int, float)}
        self._changed = {k for k, v in numbers.items() if self._last.get(k, v) != v}
        self._last |= numbers
        numbers = {k: v for k, v in numbers.items() if k not in self._fixed}
        values = self._numbers.setdefault(tuple(numbers), {})
        values.update(numbers)
        held = {k: CallNumber(k, values) if k in numbers else v for k, v in named.items()}
        return tuple(held.pop(f"args[{i}]") for i in range(len(args))), held

    def after_step(self, inputs: Collection[str]) -> None:
        """The call ran a step with these numbers as inputs, by the names of their places: one that
        has changed and is none of them can not be one. The same on every rank."""
        self._fixed |= {k for k in self._changed if f"{ARGUMENTS}[{k!r}]" not in inputs}

    def same(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call in the form of the first; those of a call that does not fit the
        signature as they are."""
        given = self._by_name(args, kwargs)
        if given is None:
            return args, dict(kwargs)
        if self._first is None:
            self._first = tuple(given)[: len(args)], tuple(kwargs)
        positions, keywords = self._first
        by_position = [given.pop(n) for n in takewhile(given.__contains__, positions)]
        ordered = {name: given.pop(name) for name in keywords if name in given}
        return tuple(by_position), {**ordered, **given}

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Argument → value, those by position first; None where some have no name."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        kinds = self._signature.parameters.values()
        named = [p.name for p in takewhile(lambda p: p.kind is p.POSITIONAL_OR_KEYWORD, kinds)]
        if len(args) > len(named):
            return None
        return {**dict(zip(named, args, strict=False)), **kwargs}
