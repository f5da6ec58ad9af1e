"""torch.distributed: meshes without groups, strided shards and a flat all-gather's two names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Meshes of owners, to present parameters as DTensors (runtime/parameters/state.py).
from torch.distributed.device_mesh import DeviceMesh

# A dim sharded section by section: DTensor's form of `outer` in runtime/parameters/layout.py.
from torch.distributed.tensor.placement_types import _StridedShard


def submesh(device: str, ranks: torch.Tensor, rank: int, names: tuple[str, ...] = ()) -> DeviceMesh:
    """A mesh of some ranks without process groups of its own; `rank` need not be one of them."""
    named = names or None
    return DeviceMesh(device, ranks, mesh_dim_names=named, _init_backend=False, _rank=rank)


def StridedShard(dim: int, sections: int) -> Any:
    """Placement: `dim` seen as [sections, ...], each of them sharded."""
    return _StridedShard(dim, split_factor=sections)


def all_gather_flat(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """`dist.all_gather_single`, under the name that torch before 2.13 has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, **options)


def default_store() -> Any:
    """The store of the default process group. Raises ValueError where there is none."""
    return dist.distributed_c10d._get_default_store()
