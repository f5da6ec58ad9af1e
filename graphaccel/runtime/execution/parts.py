"""Joins values of the batch's parts (a microbatch on a data rank) into the whole batch's, and
slices.

Microbatch k of data rank r is part `r * microbatches + k`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphaccel.compat.torch.distributed import all_gather_flat
from graphaccel.ir.program import Value
from graphaccel.runtime.mesh import Mesh
from graphaccel.sharding.rules.batch_placement import PARTIAL, sharded_dim
from graphaccel.sharding.rules.parts import JOINED, SUMMED
from graphaccel.sharding.rules.shard import Shard


@dataclass
class Parts:
    """The values that the forwards of a stage pass to its head. count: parts of the whole batch."""

    count: int
    given: dict[str, list[Tensor]] = field(default_factory=dict)

    def take(self, value: Value, part: Tensor) -> None:
        """Add a part of a value, in the order of the microbatches."""
        if value.name not in self.given:
            own = value.kind == SUMMED and self.count > 1  # accumulated into below, in place
            self.given[value.name] = [part.clone() if own else part]
        elif value.kind == SUMMED:
            self.given[value.name][0].add_(part)
        elif value.kind == JOINED:
            self.given[value.name].append(part)

    def whole(self, value: Value, data: int, mesh: Mesh) -> Tensor:
        """The value of the whole batch, on every data rank. Its parts are freed here."""
        parts = self.given.pop(value.name)
        if value.kind == SUMMED and data > 1:
            dist.all_reduce(parts[0], group=mesh.data_group)
        if value.kind != JOINED:
            return parts[0]
        dim = value.batch_dim
        if value.outer > 1:
            parts = [p.unflatten(dim, (value.outer, -1)) for p in parts]
        along = dim + (value.outer > 1)
        joined = torch.cat(parts, along) if len(parts) > 1 else parts[0]
        parts.clear()
        if data > 1:
            joined = over_data(joined, along, mesh)
        return (joined.flatten(dim, along) if value.outer > 1 else joined).contiguous()


def part_of(tensor: Tensor, value: Value, part: int, parts: int) -> Tensor:
    """One part's slice of a value of the whole batch, or all of it if it has no batch dim."""
    dim = value.batch_dim
    if dim < 0 or parts == 1:
        return tensor
    size = tensor.shape[dim] // (parts * value.outer)
    if value.outer == 1:
        return tensor.narrow(dim, part * size, size)
    sections = tensor.unflatten(dim, (value.outer, -1))
    return sections.narrow(dim + 1, part * size, size).flatten(dim, dim + 1)


def of_microbatches(parts: Sequence[Tensor], place: Any) -> Tensor:
    """The values of several microbatches joined; `place` as for `over_data`."""
    if place == PARTIAL:
        return torch.stack(list(parts)).sum(0)
    if isinstance(place, Shard):
        sections = [p.unflatten(place.dim, (place.outer, -1)) for p in parts]
        return torch.cat(sections, place.dim + 1).flatten(place.dim, place.dim + 1)
    return torch.cat(list(parts), place) if isinstance(place, int) else parts[-1]


def own_part(tensor: Tensor, place: Any, mesh: Mesh) -> Tensor:
    """This data rank's part of a value of the whole batch: the reverse of `over_data`."""
    at = sharded_dim(place)
    if at is None or mesh.data == 1:
        return tensor
    value = Value("batch", "", batch_dim=at[0], outer=at[1])
    return part_of(tensor, value, mesh.data_index, mesh.data)


def over_data(tensor: Tensor, place: Any, mesh: Mesh) -> Tensor:
    """A data rank's part, on every rank: all-gathered, all-reduced, or as it is."""
    if place == PARTIAL:
        whole = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=mesh.data_group)
        return whole
    if isinstance(place, Shard):
        sections = tensor.unflatten(place.dim, (place.outer, -1))
        return over_data(sections, place.dim + 1, mesh).flatten(place.dim, place.dim + 1)
    if not isinstance(place, int):
        return tensor
    part = tensor.movedim(place, 0).contiguous()
    whole = part.new_empty((part.shape[0] * mesh.data, *part.shape[1:]))
    all_gather_flat(whole, part, group=mesh.data_group)
    return whole.movedim(0, place)


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its dims in this order of memory, outermost first: copied if need be."""
    strides = [tensor.stride(dim) for dim in order if tensor.shape[dim] > 1]
    if strides == sorted(strides, reverse=True):
        return tensor
    laid = torch.empty_permuted(
        tensor.shape, tuple(order), dtype=tensor.dtype, device=tensor.device
    )
    return laid.copy_(tensor)
