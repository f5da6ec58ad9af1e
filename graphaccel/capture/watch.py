"""What a model's forward does past the ops of its graph, seen while it is exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphaccel.capture.weights import Weights


class _Watch(TorchFunctionMode):
    """Sees every function of torch that the forward calls, with the tensors as it has them.

    own: ids of the parameters and buffers that stand in for the model's while it is exported.
    """

    def __init__(self, weights: Weights, own: set[int]) -> None:
        super().__init__()
        self._weights, self._own = weights, own

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs.values())):
            if id(tensor) not in self._own:
                self._weights.check(tensor)
        return func(*args, **kwargs)


def watching(model: nn.Module, weights: Weights) -> Callable[[], Any]:
    """A context for the forward of `model`, whose weights these are, while it is exported.

    Raises Unregistered.
    """

    @contextmanager
    def watched() -> Iterator[None]:
        own = {id(t) for t in (*model.parameters(), *model.buffers())}
        with _Watch(weights, own):
            yield

    return watched


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
