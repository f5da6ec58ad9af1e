"""Measure the bytes of tensor storage alive, and their peak, while a piece of code runs.

The measured counterpart of the planner's liveness prediction, on any device: each storage is
counted once, however many views it has, from the operator that returns it until it is freed.
Not seen: scratch buffers inside an operator or a collective, what the allocator rounds up or keeps,
and storages resized after they were made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphaccel.compat.torch import TorchDispatchMode, is_traceable_wrapper_subclass


class PeakMeter(TorchDispatchMode):
    """Counts storages while it is on.

    ```
    with PeakMeter(resident=[*model.parameters(), *batch.values()]) as meter:
        model(**batch).loss.backward()
    print(meter.peak, meter.peak_op)
    ```
    `resident`: tensors that exist already and count from the start (parameters, buffers, batch,
    optimizer state). Tensors made before that are neither in it nor freed by it are left out.
    `device`: count storages of this device type only ("cuda"); None counts all but "meta".

    `current` and `peak` are bytes; `peak_op` is the operator that reached the peak, "resident" when
    nothing after the start did. A meter can be turned on again and goes on counting.
    """

    def __init__(self, resident: Iterable[Tensor] = (), device: str | None = None) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.peak_op = "resident"
        self._device = device
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in resident:
            self._count(tensor)
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the peak so far: the bytes alive now become the peak."""
        self.peak = self.current
        self.peak_op = "resident"

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Views and in-place results share a storage with an argument: counted where it was made.
        given = {id(s) for value in (*args, *kwargs.values()) for s in _storages(value)}
        for storage in _storages(result):
            if id(storage) not in given:
                self._add(storage)
        if self.current > self.peak:
            self.peak, self.peak_op = self.current, str(func)
        return result

    def _count(self, tensor: Tensor) -> None:
        for storage in _storages(tensor):
            self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        kind = storage.device.type
        key = id(storage)
        if key in self._alive or kind == "meta" or self._device not in (None, kind):
            return
        size = storage.nbytes()

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self.current -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.current += size


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in nested lists and tuples, wrapper subclasses opened."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from _storages(getattr(value, name))
        else:
            yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _storages(part)
