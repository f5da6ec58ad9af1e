"""Digests of the weights that several ranks hold, which are equal while their models are the same.

Gradients are all-reduced over the data axis, so all of its ranks update their weights to the same
bits. What one rank alone does to gradients or weights (`clip_grad_norm_` below `if rank == 0`)
makes their models drift apart without an error: no later collective compares weights.

Each time, some bytes of every weight are read, which a change of the gradient reaches; all bytes
are read now and then, for a change of a few elements. Weights on a GPU are compared one time later,
so that no step waits for the device.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from graphaccel.runtime import digest
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor, local_of

SAMPLE = 256
"""Bytes of each weight that are read each time."""
EVERY = 64
"""Of that many times all bytes are read in one."""
NUMBERS = 6
"""Length of `Copies.numbers`."""
_REDUNDANT = ("tensor",)
"""Axes on which a gradient may be computed on each rank by itself: equal but for rounding."""


class Copies:
    """The weights of this rank. All ranks ask for `numbers` at the same moments."""

    def __init__(self, parameters: Iterable[torch.Tensor], mesh: Mesh) -> None:
        """parameters: as the plan stores them, whole, shards or on another rank."""
        held = [p for p in parameters if not isinstance(p, RemoteTensor) and p.numel()]
        shards = [p for p in held if isinstance(p, ShardTensor)]
        self._sets = (
            _Set([p for p in held if not isinstance(p, ShardTensor)], mesh, ()),
            _Set(shards, mesh, {s.axis for p in shards for s in p.sharding.splits}),
        )
        self._times = 0
        # One rank alone has each shard, and writes into it as often as the others into theirs.
        self._writes = mesh.writes
        stage = repr((mesh.coordinate("pipeline"), "writes"))
        self._stage = digest.of_text(stage) if shards else 0

    def numbers(self) -> list[int]:
        """int64 [NUMBERS]: of weights held whole, and of shards, which ranks hold the same, and a
        digest of them, equal on those ranks; the pipeline coordinate, and how often shards were
        written. Zeros where this rank has none."""
        complete = self._times % EVERY == 1
        self._times += 1
        results = [n for one in self._sets for n in (one.key, one.digest(complete=complete))]
        return [*results, self._stage, self._writes.count if self._stage else 0]


class _Set:
    """Weights that the same ranks hold."""

    def __init__(self, tensors: Sequence[torch.Tensor], mesh: Mesh, along: Iterable[str]) -> None:
        """along: axes that they are sharded over."""
        self._tensors = tensors
        self._samples: dict[int, tuple[int, torch.Tensor, Any]] = {}
        self._later = digest.Later()
        apart = "+".join({"pipeline", *_REDUNDANT, *along})
        place = (mesh.coordinate(apart), _processor(mesh.device))
        self.key = digest.of_text(repr(place)) if tensors else 0

    def digest(self, *, complete: bool) -> int:
        """Of all bytes or of samples; on a GPU those of the time before."""
        earlier, result = self._later.take(), 0
        there: list[torch.Tensor] = []
        for number, tensor in enumerate(self._tensors):
            local = local_of(tensor)
            part, array = self._sampled(number, local)
            if local.device.type != "cpu":
                there.append(local if complete else part)
            elif complete:
                result = digest.of_host([local], result)
            else:
                result = digest.of_host_array(array, result)
        if there:
            self._later.send(digest.of_device(there if complete else [torch.cat(there)]))
        return digest.of_numbers((result, earlier)) if self._tensors else 0

    def _sampled(self, number: int, local: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The first bytes of a tensor in memory, and as an array where that is the host's."""
        address = local.data_ptr()
        known = self._samples.get(number)
        if known is None or known[0] != address:
            dense = torch.ops.aten.is_non_overlapping_and_dense(local)
            count = max(1, SAMPLE // local.element_size())
            flat = local.detach() if dense else local.detach().contiguous()
            flat = flat.as_strided((min(count, flat.numel()),), (1,), flat.storage_offset())
            part = flat.view(torch.uint8)
            known = address, part, part.numpy() if part.is_cpu else None
            if dense:
                self._samples[number] = known
        return known[1], known[2]


def unequal(numbers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks whose digest differs from that of the first rank that holds the same.

    numbers: [ranks, NUMBERS], what `Copies.numbers` gave on each.
    """
    first: dict[tuple[int, int], int] = {}
    ranks = set()
    for rank, row in enumerate(numbers):
        for at in range(0, NUMBERS, 2):
            if row[at] and first.setdefault((at, row[at]), row[at + 1]) != row[at + 1]:
                ranks.add(rank)
    return tuple(sorted(ranks))


def _processor(device: torch.device) -> str:
    """What computes the updates: processors of different kinds may round them differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:  # what platform.processor() gives on Linux is empty, or the same for all
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line for line in lines if line.startswith("model name")), platform.processor())
    return f"{named} {torch.backends.cpu.get_cpu_capability()}"
