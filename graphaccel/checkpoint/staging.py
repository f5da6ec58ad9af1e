"""Copies of tensors in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphaccel.checkpoint.contents import local_memory, map_memory

_THREADS = 4
"""At most, that copy within host memory: one core does not use a host's bandwidth."""


class Staging:
    """One rank's host copies, kept from save to save with the threads that fill them; pinned beside
    a GPU."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._allocating: list[Future[None]] = []
        self._reserved: set[str] = set()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        count = min(_THREADS, os.cpu_count() or 1)
        return ThreadPoolExecutor(count, thread_name_prefix="graphaccel-copy")

    @property
    def empty(self) -> bool:
        """Whether nothing is allocated yet."""
        return not self._allocating and not self._kept

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to allocate the memory of the first copy, where it is not yet, in the background.

        Memory that a process never touched costs many times what the copy into it costs.
        """

        def allocate(name: str, shape: torch.Size, dtype: torch.dtype, pinned: bool) -> None:
            self._kept[name] = torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor) and name not in self._reserved:
                self._reserved.add(name)
                held = local_memory(tensor)
                kind = held.shape, held.dtype, held.device.type == "cuda"
                self._allocating.append(self._threads.submit(allocate, name, *kind))

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with their memory on this rank copied; valid when this returns."""
        allocating, self._allocating = self._allocating, []
        for started in allocating:
            started.result()
        built = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                built[name] = tensor.detach().clone()
            else:
                built[name] = map_memory(tensor, lambda t, name=name: self._copied(name, t))
        self._kept = {name: kept for name, kept in self._kept.items() if name in built}
        copies, self._copies = self._copies, []
        list(self._threads.map(lambda pair: pair[0].copy_(pair[1]), copies))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return built

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._kept[name] = kept
        if tensor.device.type == "cpu":
            self._copies.append((kept, tensor))
        else:
            kept.copy_(tensor, non_blocking=True)
        return kept
