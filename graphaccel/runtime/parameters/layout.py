"""How a tensor is sharded over a mesh: shards of a full tensor, and a full tensor from shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod

import torch

from graphaccel.compat.torch.distributed import all_gather_flat
from graphaccel.ir.program import Sharded
from graphaccel.runtime.mesh import Mesh


@dataclass(frozen=True)
class ShardLayout:
    """A tensor of full shape `shape` sharded by `splits` over the ranks of `mesh`."""

    shape: torch.Size
    splits: tuple[Sharded, ...]
    mesh: Mesh = field(repr=False, compare=False)

    @cached_property
    def axes(self) -> str:
        """The axes it is sharded over, outermost first, joined by "+"."""
        return self.mesh.joined({split.axis for split in self.splits})

    @cached_property
    def local_shape(self) -> torch.Size:
        """The shape of one shard."""
        shape: tuple[int, ...] = self.shape
        for split in self.splits:
            shape = split.local(shape, self.mesh.size(split.axis))
        return torch.Size(shape)

    @cached_property
    def padded(self) -> bool:
        """Whether the axes do not divide it evenly: the last ranks then have zeros at the end of a
        dim."""
        places = {s.axis: self.mesh.size(s.axis) - 1 for s in self.splits}
        last = self.at(torch.empty(self.shape, device="meta"), places)
        return last.shape != self.local_shape

    def filled(self, part: torch.Tensor) -> torch.Tensor:
        """A rank's part of the full tensor, with padding added."""
        if part.shape == self.local_shape:
            return part
        built = part.new_zeros(self.local_shape)
        built[_within(part.shape)] = part
        return built

    def clear(self, local: torch.Tensor) -> None:
        """Zero the padding of this rank's shard."""
        if self.padded:
            real = self.here(torch.empty(self.shape, device="meta")).shape
            for dim, size in enumerate(real):
                local.narrow(dim, size, local.shape[dim] - size).zero_()

    def real(self, local: torch.Tensor) -> torch.Tensor:
        """A view of this rank's shard without its padding."""
        if not self.padded:
            return local
        return local[_within(self.here(torch.empty(self.shape, device="meta")).shape)]

    def here(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the full tensor, without padding; a view for a simple layout."""
        return self.at(whole, {s.axis: self.mesh.coordinate(s.axis) for s in self.splits})

    @cached_property
    def simple(self) -> bool:
        """Whether a shard is one contiguous range in every dim."""
        return all(split.outer == 1 for split in self.splits)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the full tensor; a view for a simple layout without padding."""
        if not self.simple or self.padded:
            return self.filled(self.here(whole))
        for window in self._windows:
            whole = whole.narrow(*window)
        return whole

    @cached_property
    def _windows(self) -> tuple[tuple[int, int, int], ...]:
        """The ranges that `here` narrows to in a simple layout without padding: (dim, start, size),
        one per split. Cached, as an optimizer step needs it for every parameter and gradient."""
        shape, result = list(self.shape), []
        for split in self.splits:
            size = shape[split.dim] = shape[split.dim] // self.mesh.size(split.axis)
            result.append((split.dim, self.mesh.coordinate(split.axis) * size, size))
        return tuple(result)

    def at(self, whole: torch.Tensor, place: dict[str, int]) -> torch.Tensor:
        """The part of the full tensor at these mesh coordinates, without padding."""
        for split in self.splits:
            parts = self.mesh.size(split.axis)
            size = -(-whole.shape[split.dim] // parts) // split.outer
            if split.outer == 1:
                start = min(place[split.axis] * size, whole.shape[split.dim])
                size = min(size, whole.shape[split.dim] - start)
                whole = whole.narrow(split.dim, start, size)
            else:
                sections = whole.unflatten(split.dim, (split.outer, parts, size))
                own = sections.select(split.dim + 1, place[split.axis])
                whole = own.flatten(split.dim, split.dim + 1)
        return whole

    def pieces(self) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """This rank's shard as boxes that are contiguous in the full tensor: for each its offsets
        in the full tensor, its offsets in the shard, and its sizes."""
        runs: list[list[tuple[int, int, int]]] = []
        for dim, size in enumerate(self.shape):
            held = torch.arange(size)
            own = tuple(replace(s, dim=0) for s in self.splits if s.dim == dim)
            held = ShardLayout(held.shape, own, self.mesh).here(held)
            runs.append(_runs(held.tolist()))
        return [
            (tuple(r[0] for r in box), tuple(r[1] for r in box), tuple(r[2] for r in box))
            for box in product(*runs)
        ]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """All-gather the full tensor on every rank. Collective over the ranks of `axes`."""
        group = self.mesh.group(self.axes)
        count = self.mesh.size(self.axes)
        # gloo gathers neither booleans nor complex numbers: gather bytes
        flat = local.contiguous().reshape(-1).to(self.mesh.device)  # possibly from the host
        sent = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
        parts = sent.new_empty(count * sent.numel())
        all_gather_flat(parts, sent, group=group)
        shards = parts.view(flat.dtype).view(count, *local.shape)
        return self.assemble(list(shards)).to(local.device)

    def assemble(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the shards of all ranks of `axes`, ordered by coordinate."""
        names = self.axes.split("+")
        whole = shards[0].new_empty(self.shape)
        places = product(*(range(self.mesh.size(axis)) for axis in names))
        numbers = None if self.simple else torch.arange(prod(self.shape)).view(self.shape)
        for shard, place in zip(shards, places, strict=True):
            at = dict(zip(names, place, strict=True))
            if numbers is None:
                part = self.at(whole, at)
                part.copy_(shard[_within(part.shape)])
            else:
                where = self.at(numbers, at)
                held = shard[_within(where.shape)].reshape(-1)
                whole.view(-1)[where.reshape(-1).to(whole.device)] = held
        return whole


def _within(shape: torch.Size) -> tuple[slice, ...]:
    """The positions below `shape`."""
    return tuple(slice(0, size) for size in shape)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers: (first number, its position, length)."""
    results: list[tuple[int, int, int]] = []
    for position, number in enumerate(numbers):
        if results and number == results[-1][0] + results[-1][2]:
            results[-1] = (*results[-1][:2], results[-1][2] + 1)
        else:
            results.append((number, position, 1))
    return results
