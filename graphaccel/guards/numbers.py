"""Numbers of the model as graph inputs: each is a 0-dim float64 tensor while it is traced.

In arithmetic a tensor in the place of a number computes the same, with the type promotion that
torch applies to numbers: `loss * self.alpha` stays float32. Where a model does anything else with a
number (a branch, a shape, `F.dropout(x, self.p)`), tracing raises `NotANumber`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphaccel.guards.guards import current
from graphaccel.guards.place import Place
from graphaccel.guards.places import places
from graphaccel.guards.reads import Reads

REFLECTED = {
    "add": "__radd__",
    "sub": "__rsub__",
    "mul": "__rmul__",
    "div": "__rtruediv__",
    "truediv": "__rtruediv__",
}
"""Operators with a number on the left of a tensor: torch computes these from the right operand."""
ARITHMETIC = frozenset(
    "add radd iadd sub rsub isub mul rmul imul div rdiv truediv rtruediv itruediv true_divide "
    "multiply subtract divide pow rpow neg negative pos where maximum minimum".split()
)


class NotANumber(Exception):
    """A model uses a number in a way that a tensor cannot replace."""


class _Arithmetic(TorchFunctionMode):
    """Gives tensors that stand for numbers the type promotion of numbers."""

    def __init__(self, numbers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._numbers = {id(n): n for n in numbers}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [a for a in args if self._is(a)]
        others = [*(kwargs or {}).values()]
        nested = [v for a in (*args, *others) if isinstance(a, (list, tuple)) for v in a]
        if any(self._is(v) for v in (*nested, *others)):
            raise NotANumber(f"{func}")
        if not given:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name not in ARITHMETIC or kwargs:
            raise NotANumber(f"{func}")
        tensors = [a for a in args if isinstance(a, torch.Tensor) and not self._is(a)]
        if not tensors:
            return self._number(func(*args))
        reflected = REFLECTED.get(name)
        if reflected is not None and self._is(args[0]):
            return self.__torch_function__(getattr(torch.Tensor, reflected), types, args[::-1])
        values = [t for t in tensors if t.dtype != torch.bool] or tensors
        wanted = torch.result_type(values[0], 1.0)
        return func(*(a.to(wanted) if self._casts(a, values, wanted) else a for a in args))

    def _is(self, value: Any) -> bool:
        return id(value) in self._numbers

    def _number(self, value: torch.Tensor) -> torch.Tensor:
        self._numbers[id(value)] = value
        return value

    def _casts(self, value: Any, tensors: Sequence[torch.Tensor], wanted: torch.dtype) -> bool:
        """Whether the result would have the number's dtype: it is rounded first."""
        if not self._is(value):
            return False
        return any(torch.result_type(t, value) != wanted for t in tensors)


@contextmanager
def as_inputs(places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """In this context each place holds its tensor instead of its number."""
    before = [current(place) for place in places]
    try:
        for place, tensor in zip(places, tensors, strict=True):
            place.put(tensor)
        with _Arithmetic(tensors):
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.put(value)


def named_as_inputs(
    model: nn.Module, reads: Reads, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> AbstractContextManager[None]:
    """The same by names of places, for one trace: export replaces the lists that a model holds."""
    result = places(model, reads)
    return as_inputs([result[name] for name in names], tensors)
