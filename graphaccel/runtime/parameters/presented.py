"""How a tensor of which other processes hold the rest stands in a state dict.

A shard is a DTensor of the same memory, and what other stages hold a DTensor that is empty here:
torch.distributed.checkpoint reads and writes each on its own rank. A shard that no DTensor can
describe (fused weights, sharded section by section) is a ShardTensor, which describes itself.
Operators see the ShardTensor or RemoteTensor that a DTensor was made from: a DTensor takes no
plain tensor beside it, which averages of weights and `target.load_state_dict(model.state_dict())`
need.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.distributed import StridedShard
from graphaccel.compat.torch.tensors import no_torch_function
from graphaccel.errors import ElsewhereNeeded, PartOfModel
from graphaccel.errors.messages import line_of_script
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.readable import Readable
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor

Meshes = Mapping[int, DeviceMesh]
_SHAPE = getattr_static(torch.Tensor, "shape").__get__  # what `tensor.shape` calls


def part_of_state(of_optimizer: bool, *, loaded: bool = False) -> PartOfModel:
    """The error for a state dict that one process would save. loaded: which it loads."""
    what = "this optimizer's state dict" if of_optimizer else "this state dict"
    return PartOfModel(what=what, of_optimizer=of_optimizer, loaded=loaded)


class _Part:
    """A tensor in a state dict of which other processes hold the rest: code that reads this
    process's memory alone, unaware of the others, is refused."""

    of_optimizer: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise part_of_state(self.of_optimizer)

    def untyped_storage(self) -> Any:
        """Called by safetensors. Raises PartOfModel (GA411)."""
        raise part_of_state(self.of_optimizer)


class ShardPart(_Part, ShardTensor):
    """A shard that no DTensor can describe."""


@dataclass(frozen=True)
class _Place:
    """layout: how it is sharded. owner: the pipeline coordinate that has it. meshes: of each."""

    layout: ShardLayout
    owner: int
    meshes: Meshes
    of_optimizer: bool


class DTensorPart(_Part, Readable, DTensor):
    """A shard, or a tensor of another process. source: what it was made from; the same memory."""

    source: ShardTensor | RemoteTensor
    place: _Place

    def values(self) -> torch.Tensor:
        """The full tensor. Collective. Raises ElsewhereNeeded (GA408) for one of another stage."""
        return self.source.values()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        built = memo[id(self)] = self._like(copy.deepcopy(self.source, memo))
        return built

    def _like(self, value: Any) -> Any:
        """What an operator made of the sources, as it stands in a state dict, where it can."""
        place = self.place
        if isinstance(value, ShardTensor):
            return shard_part(value.local, value.sharding, place.meshes, place.of_optimizer)
        return _dtensor(value, None, place)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Operators on the sources; beside DTensors of others, those of DTensors."""
        kwargs = kwargs or {}
        if func == _SHAPE:
            _check_not_loaded(args[0])
        if any(issubclass(t, DTensor) and not issubclass(t, DTensorPart) for t in types):
            return no_torch_function(func, types, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = {id(leaf.source): leaf for leaf in leaves if isinstance(leaf, DTensorPart)}
        sources = [leaf.source if isinstance(leaf, DTensorPart) else leaf for leaf in leaves]
        given, named = pytree.tree_unflatten(sources, spec)

        def presented(value: Any) -> Any:  # a part itself, where it was written in place
            if id(value) in parts:
                return parts[id(value)]
            same_kind = (p for p in parts.values() if isinstance(value, type(p.source)))
            usable = (
                p for p in same_kind if value.shape == p.shape or isinstance(value, ShardTensor)
            )
            part = next(usable, None)  # of the same kind: what another stage has is empty here
            return value if part is None else part._like(value)

        kinds = (ShardTensor, RemoteTensor)
        return pytree.tree_map_only(kinds, presented, func(*given, **named))


def _check_not_loaded(part: DTensorPart) -> None:
    """Raises ElsewhereNeeded (GA408) where a module that has no plan loads what another stage has.
    Raised by the copy it would be one of many texts in an error of torch's."""
    frame = sys._getframe(2)
    if frame.f_code.co_name == "_load_from_state_dict" and isinstance(part.source, RemoteTensor):
        if not isinstance(frame.f_locals.get("param"), RemoteTensor):
            raise ElsewhereNeeded(op="load_state_dict", location=line_of_script())


def shard_part(
    local: torch.Tensor, layout: ShardLayout, meshes: Meshes, of_optimizer: bool
) -> ShardTensor | DTensorPart:
    """A shard as it stands in a state dict, in the same memory. A DTensor would copy one from the
    host."""
    source = ShardTensor(local, layout)
    if layout.simple and local.device.type == layout.mesh.device.type:
        place = _Place(layout, layout.mesh.pipeline_index, meshes, of_optimizer)
        return _dtensor(source, local, place)
    source.__class__ = ShardPart
    source.of_optimizer = of_optimizer  # type: ignore[attr-defined]
    return source


def remote_part(
    source: RemoteTensor, layout: ShardLayout, owner: int, meshes: Meshes
) -> DTensorPart:
    """A tensor of the pipeline coordinate `owner` in a model's state dict: empty here. layout: by
    which it is sharded there."""
    return _dtensor(source, None, _Place(layout, owner, meshes, of_optimizer=False))


def _dtensor(source: Any, local: torch.Tensor | None, place: _Place) -> DTensorPart:
    """local: None where it is empty here."""
    layout, mesh = place.layout, place.meshes[place.owner]
    if local is None:
        local = torch.empty(0, dtype=source.dtype, device=source.device)
    if not layout.shape:  # from_local takes no shape as none given, and reads that of the tensor
        scalar = local if local.dim() == 0 else local.new_empty(())
        built: Any = DTensor.from_local(scalar, mesh, placements(layout, mesh), run_check=False)
    else:
        built = DTensor.from_local(
            layout.real(local) if local.dim() == len(layout.shape) else local,
            mesh,
            placements(layout, mesh),
            run_check=False,
            shape=layout.shape,
            stride=torch.empty(layout.shape, device="meta").stride(),
        )
    built.__class__ = DTensorPart
    built.source, built.place, built.of_optimizer = source, place, place.of_optimizer
    return built


def placements(layout: ShardLayout, meshes: DeviceMesh) -> list[Any]:
    """A layout as DTensor placements, one for each dim of the mesh. DTensor shards over the outer
    axes first: where an inner axis has split the same dim before, the outer one takes a strided
    shard."""
    results: list[Any] = []
    order = layout.mesh.axes
    for axis in meshes.mesh_dim_names or ():
        number = next((i for i, s in enumerate(layout.splits) if s.axis == axis), None)
        if number is None:
            results.append(Replicate())
            continue
        split = layout.splits[number]
        sections = split.outer
        for other in layout.splits[:number]:
            if other.dim == split.dim and order.index(other.axis) > order.index(axis):
                sections *= layout.mesh.size(other.axis)
        results.append(StridedShard(split.dim, sections) if sections > 1 else Shard(split.dim))
    return results or [Replicate()]
