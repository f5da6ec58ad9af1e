"""Draws from Python's and NumPy's generators that decide nothing.

    p = random.uniform(0, 1)
    if self.training and p < self.layerdrop:        # with layerdrop = 0.0, never

A graph need not draw them. They are found by a forward in which such a draw returns an object that
answers only what its range decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import ref

import numpy as np
import torch

from graphaccel.capture.state.successive import comparable

_UNIT = ((random, "random"), (np.random, "random"), (np.random, "rand"))
_UNIFORM = ((random, "uniform"), (np.random, "uniform"))
_NUMBERS = (int, float)


class _Between:
    """A number of which no more is known than that low <= number <= high."""

    def __init__(self, low: float, high: float, *, inclusive: bool) -> None:
        self._low, self._high, self._inclusive = low, high, inclusive

    def _is_under(self, other: Any) -> bool:
        """Whether it is less than a number; raises where its value decides that."""
        if type(other) in _NUMBERS:
            if other > self._high or (other == self._high and not self._inclusive):
                return True
            if other <= self._low:
                return False
        return self._refuse()

    def _is_over(self, other: Any) -> bool:
        if type(other) in _NUMBERS:
            if other < self._low:
                return True
            if other >= self._high:
                return False
        return self._refuse()

    def __lt__(self, other: Any) -> bool:
        return self._is_under(other)

    def __ge__(self, other: Any) -> bool:
        return not self._is_under(other)

    def __gt__(self, other: Any) -> bool:
        return self._is_over(other)

    def __le__(self, other: Any) -> bool:
        return not self._is_over(other)

    def _refuse(self, *_: Any) -> Any:
        raise _Decides

    __getattr__ = __bool__ = __eq__ = __ne__ = __hash__ = __float__ = __int__ = _refuse
    __index__ = __str__ = __repr__ = __format__ = __round__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __reduce_ex__ = _refuse


class _Decides(BaseException):
    """The value of a draw decides something; not caught by the model's own code."""


def decide_nothing(forward: Callable[[], bool]) -> bool:
    """Whether a forward runs, and leaves no draw behind, where none has a value that can be used.

    Draws of one number alone are replaced: others change a generator's state.
    """
    drawn: list[ref[_Between]] = []
    before = _states()
    try:
        with _replaced(drawn):
            ran = forward()
    except _Decides:
        return False
    return ran and _states() == before and all(one() is None for one in drawn)


def _states() -> tuple[Any, ...]:
    return random.getstate(), comparable(np.random.get_state())


@contextmanager
def generators_restored() -> Iterator[None]:
    """A context after which Python's, NumPy's and torch's generators are as before."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(own)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _replaced(drawn: list[ref[_Between]]) -> Iterator[None]:
    def between(low: float, high: float, *, inclusive: bool) -> _Between:
        result = _Between(low, high, inclusive=inclusive)
        drawn.append(ref(result))
        return result

    def unit(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                return original(*args, **kwargs)
            return between(0.0, 1.0, inclusive=False)

        return draw

    def uniform(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 2 or not all(type(a) in _NUMBERS for a in args):
                return original(*args, **kwargs)
            return between(min(args), max(args), inclusive=True)  # by rounding

        return draw

    with ExitStack() as stack:
        for pairs, replacement in ((_UNIT, unit), (_UNIFORM, uniform)):
            for module, name in pairs:
                form = replacement(getattr(module, name))
                stack.enter_context(patch.object(module, name, form))
        yield
