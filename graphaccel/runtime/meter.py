"""Measures the bytes of live tensor storage, and their peak, while code runs.

The measured counterpart of the planner's liveness prediction, on any device: each storage is
counted once, however many views it has, from the operator that returns it until it is freed. Not
seen: scratch buffers inside an operator or a collective, what the allocator rounds up or caches,
and storages resized after their creation. What a collective reads counts until it is waited for, as
NCCL needs it: gloo copies it internally, and frees it immediately. An all-reduce reads a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphaccel.compat.torch.modes import TorchDispatchMode, is_traceable_wrapper_subclass
from graphaccel.kernels.host_copy import AHEAD, TO_DEVICE, TO_HOST
from graphaccel.kernels.ops.expert_rows import EXCHANGE


class PeakMeter(TorchDispatchMode):
    """Counts storages while it is on.

    ```
    with PeakMeter(resident=[*model.parameters(), *batch.values()]) as meter:
        model(**batch).loss.backward()
    print(meter.peak, meter.peak_op)
    ```
    `resident`: tensors that exist already and count from the start (parameters, buffers, batch,
    optimizer state). Tensors made before that are neither in it nor freed by it are left out.
    `host`: those that the plan keeps on the host; where the device is the CPU nothing else
    distinguishes them.
    `device`: count storages of this device type only ("cuda"); None counts all but "meta".

    `current` and `peak` are bytes on the device, `host_current` and `host_peak` those that the plan
    keeps on the host: results of `host_copy.to_host`, and of ops whose inputs all are such tensors.
    `peak_op` is the operator that reached the peak, "resident" when nothing after the start did. A
    meter can be entered again and continues counting.
    """

    def __init__(
        self,
        resident: Iterable[Tensor] = (),
        device: str | None = None,
        host: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self.current = self.host_current = 0
        self.peak = self.host_peak = 0
        self.peak_op = "resident"
        self._device = device
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._on_host: set[int] = set()
        self._sent: dict[int, list[torch.UntypedStorage]] = {}  # by the tensor being received
        for tensor in host:
            self.count(tensor, on_host=True)
        for tensor in resident:
            self.count(tensor)
        self.reset_peak()

    def reset_peak(self) -> None:
        """Reset the peak to the bytes alive now."""
        self.peak, self.host_peak = self.current, self.host_current
        self.peak_op = "resident"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is EXCHANGE or func.namespace == "_c10d_functional":  # collectives
            self._note_sent(func, args, result)
        # Views and in-place results share a storage with an argument, which was counted when
        # created.
        given = {id(s) for value in (*args, *kwargs.values()) for s in _storages(value)}
        on_host = func is TO_HOST or (
            bool(given) and func not in (AHEAD, TO_DEVICE) and given <= self._on_host
        )
        for storage in _storages(result):
            if id(storage) not in given:
                self._add(storage, on_host)
        self.host_peak = max(self.host_peak, self.host_current)
        if self.current > self.peak:
            self.peak, self.peak_op = self.current, str(func)
        return result

    def _note_sent(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._sent.pop(id(args[0].untyped_storage()), None)
        elif func is not torch.ops._c10d_functional.all_reduce.default:  # it reads a copy
            for storage in _storages(result):
                self._sent[id(storage)] = list(_storages(args))

    def count(self, tensor: Tensor, on_host: bool = False) -> None:
        """Count a tensor that was computed where the meter did not see it."""
        for storage in _storages(tensor):
            self._add(storage, on_host)

    def _add(self, storage: torch.UntypedStorage, on_host: bool) -> None:
        kind = storage.device.type
        key = id(storage)
        counted = on_host or self._device in (None, kind)
        if key in self._alive or kind == "meta" or not counted:
            return
        size = storage.nbytes()

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self._change(-size, key in self._on_host)
            self._on_host.discard(key)

        self._alive[key] = weakref.ref(storage, freed)
        if on_host:
            self._on_host.add(key)
        self._change(size, on_host)

    def _change(self, size: int, on_host: bool) -> None:
        if on_host:
            self.host_current += size
        else:
            self.current += size


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in nested lists and tuples; wrapper subclasses are unwrapped."""
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
