"""Copies of tensors in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphaccel.checkpoint.contents import local_memory, map_memory

_THREADS = 4
"""That copy within host memory."""


class Staging:
    """One rank's host copies, kept from save to save; pinned beside a GPU."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._reserving: threading.Thread | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is allocated yet."""
        return self._reserving is None and not self._kept

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to allocate the memory of the first copy in the background.

        Memory that a process never touched costs many times what the copy into it costs.
        """
        memory = {n: local_memory(t) for n, t in tensors.items() if not isinstance(t, DTensor)}
        kinds = {n: (t.shape, t.dtype, t.device.type == "cuda") for n, t in memory.items()}

        def allocate() -> None:
            for name, (shape, dtype, pinned) in kinds.items():
                self._kept[name] = torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self._reserving = threading.Thread(target=allocate, name="graphaccel-reserve")
        self._reserving.start()

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with their memory on this rank copied; valid when this returns."""
        if self._reserving is not None:
            self._reserving.join()
        built = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                built[name] = tensor.detach().clone()
            else:
                built[name] = map_memory(tensor, lambda t, name=name: self._copied(name, t))
        self._kept = {name: kept for name, kept in self._kept.items() if name in built}
        copies, self._copies = self._copies, []
        with ThreadPoolExecutor(_THREADS) as pool:  # one core does not use a host's bandwidth
            list(pool.map(lambda pair: pair[0].copy_(pair[1]), copies))
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
