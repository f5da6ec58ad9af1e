"""Writes each call of a model as its first one was: the same inputs by position and by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any


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
