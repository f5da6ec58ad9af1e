"""Runs a user's model and restores its state afterwards."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphaccel.compat.torch.autograd import without_tensor_hooks
from graphaccel.proof.modes import NARROW, WriteGuard

_OPAQUE = (Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.device)
_DEEP = 3
_MANY = 10_000
"""Containers with more items are the user's data, which a forward does not change."""


@dataclass(frozen=True)
class RandomState:
    """The states of all generators that a model may draw from."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @staticmethod
    def here() -> RandomState:
        """The current states."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        cpu = torch.random.get_rng_state()
        return RandomState(cpu, tuple(cuda), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.random.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def untouched(model: nn.Module, *, wide: bool = False) -> Iterator[WriteGuard]:
    """Restore parameters, buffers, gradients, hooks, modes, attributes and random states of a model
    at the end, also after an exception.

    The yielded guard is a mode to run the model in: it detects writes to parameters and to tensors
    that are attributes. Buffers are always copied: not every op declares that it writes them. What
    a forward changes outside of its modules (a global) is not restored.
    """
    state = RandomState.here()
    kept = _Attributes()
    for module in model.modules():
        kept.add(vars(module), _DEEP)
    parameters = dict(model.named_parameters())
    tensors = [*parameters.values(), *model.buffers()]
    storages = [(t, t.data) for t in tensors]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    own = {id(t) for t in tensors}
    plain = {id(t): t for t in kept.tensors if id(t) not in own}
    with without_tensor_hooks(parameters.values()):
        guard = WriteGuard({})
        try:
            if wide:
                for tensor in tensors:
                    if tensor.dtype in NARROW:
                        tensor.data = tensor.data.double()
            guard.watch({**parameters, **plain})
            yield guard
        finally:
            kept.restore()
            guard.restore()
            for tensor, data in storages:
                if tensor.dtype != data.dtype or tensor.data_ptr() != data.data_ptr():
                    tensor.data = data
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            state.restore()


class _Attributes:
    """Dicts, lists, sets and the attributes of plain objects, with their contents."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._seen: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    def add(self, value: Any, depth: int) -> None:
        """Remember a container or an object, and its contents to some depth."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
        if depth == 0 or id(value) in self._seen or isinstance(value, (*_OPAQUE, nn.Module)):
            return
        self._seen.add(id(value))
        inside: Any = ()
        if isinstance(value, dict):
            inside, held = list(value.values()), dict(value)
            if len(inside) <= _MANY:
                self._undo.append(lambda: _refill(value, held))
        elif isinstance(value, (list, deque, set)):
            inside = list(value)
            if len(inside) <= _MANY:
                self._undo.append(lambda: _refill(value, inside))
        elif isinstance(value, tuple):
            inside = value
        elif hasattr(value, "__dict__") and not callable(value):
            self.add(vars(value), depth)
        for item in inside if len(inside) <= _MANY else ():
            self.add(item, depth - 1)

    def restore(self) -> None:
        for undo in reversed(self._undo):
            undo()


def _refill(container: Any, held: Any) -> None:
    """Restore the contents of a container, if they differ; order included."""
    now = list(container.items()) if isinstance(container, dict) else list(container)
    then = list(held.items()) if isinstance(container, dict) else held
    same = len(now) == len(then) and all(_is(a, b) for a, b in zip(now, then, strict=True))
    if same:
        return
    container.clear()
    add = container.extend if isinstance(container, (list, deque)) else container.update
    add(held)


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other
