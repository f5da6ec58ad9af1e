"""State dicts of a model and an optimizer whose tensors are spread over several ranks.

What this rank holds in full is a plain tensor, a shard a DTensor of the same memory, and what other
stages hold a DTensor that is empty here: torch.distributed.checkpoint reads and writes each on its
own rank. A shard that no DTensor checkpoint can describe (fused weights, sharded section by
section) is a ShardTensor, which describes itself.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphaccel.compat.torch.distributed import StridedShard, submesh
from graphaccel.errors import GraphMisuse, PartOfModel
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor
from graphaccel.runtime.session import Session

Optimizer = torch.optim.Optimizer


def stage_meshes(session: Session, *, later: bool = False) -> dict[int, DeviceMesh]:
    """A device mesh of the ranks of each pipeline coordinate, its dims named after the axes; that
    of this rank has process groups. Collective. later: something may be sharded later."""
    mesh = session.mesh
    if mesh.pipeline == 1 and not session.states and not session.parameters and not later:
        return {}
    axes = [axis for axis in mesh.axes if axis != "pipeline" and mesh.sizes[axis] > 1]
    mesh.ensure(axes)
    shape = [mesh.sizes[axis] for axis in axes] or [1]
    results = {}
    for p in range(mesh.pipeline):
        ranks = torch.tensor(mesh.holders(p)).view(shape)
        if p == mesh.pipeline_index and axes:
            groups = [mesh.group(axis) for axis in axes]
            results[p] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0],
                mesh.device.type,
                mesh=ranks if len(groups) > 1 else None,
                mesh_dim_names=tuple(axes),
            )
        else:
            results[p] = submesh(mesh.device.type, ranks, mesh.rank, tuple(axes))
    return results


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


class _Part:
    """A tensor in a model's state dict of which other processes hold the rest: code that reads this
    process's memory alone, unaware of the others, is refused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PartOfModel(what="this state dict")

    def untyped_storage(self) -> Any:
        """Called by safetensors. Raises PartOfModel (GA411)."""
        raise PartOfModel(what="this state dict")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        built = self.detach().clone()  # type: ignore[attr-defined]
        built.__class__ = type(self)
        memo[id(self)] = built
        return built


class ShardPart(_Part, ShardTensor):
    """A shard that no DTensor can describe, in a model's state dict."""


class DTensorPart(_Part, DTensor):
    """A shard, or a tensor of another process, in a model's state dict."""


def _part(value: Any) -> Any:
    value.__class__ = DTensorPart if issubclass(type(value), DTensor) else ShardPart
    return value


def presented(local: torch.Tensor, layout: ShardLayout, meshes: Mapping[int, DeviceMesh]) -> Any:
    """A shard as checkpoints see it, in the same memory. A DTensor would copy one from the host."""
    if not layout.simple or local.device.type != layout.mesh.device.type:
        return ShardTensor(local, layout)
    return _dtensor(local, layout, meshes[layout.mesh.pipeline_index])


def _dtensor(local: torch.Tensor, layout: ShardLayout, meshes: DeviceMesh) -> DTensor:
    if not layout.shape:  # from_local takes no shape as none given, and reads that of the tensor
        scalar = local if local.dim() == 0 else local.new_empty(())
        return DTensor.from_local(scalar, meshes, placements(layout, meshes), run_check=False)
    return DTensor.from_local(
        layout.real(local) if local.dim() == len(layout.shape) else local,
        meshes,
        placements(layout, meshes),
        run_check=False,
        shape=layout.shape,
        stride=torch.empty(layout.shape, device="meta").stride(),
    )


def sharded_state_dict(
    session: Session, meshes: Mapping[int, DeviceMesh], plain: MutableMapping[str, Any], prefix: str
) -> MutableMapping[str, Any]:
    """A model's state dict with the original names: what this rank holds in full as plain tensors,
    shards and tensors of other ranks as DTensors of full shape."""
    for key, value in plain.items():
        name = key.removeprefix(prefix)
        if isinstance(value, ShardTensor):
            plain[key] = _part(presented(value.local, value.sharding, meshes))
        elif isinstance(value, RemoteTensor):
            layout = ShardLayout(value.shape, session.splits.get(name, ()), session.mesh)
            local = torch.empty(0, dtype=value.dtype, device=value.device)
            plain[key] = _part(_dtensor(local, layout, meshes[session.owner(name)]))
    return plain


def full_state(session: Session, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Full tensors on the CPU, on every rank. Collective."""
    return {
        key: whole_tensor(session, key, value).cpu().clone()
        if isinstance(value, torch.Tensor)
        else value
        for key, value in plain.items()
    }


def whole_tensor(session: Session | None, key: str, value: torch.Tensor) -> torch.Tensor:
    """One tensor of a model's state in full, on every rank. Collective.

    session: None where every rank holds all tensors in full.
    """
    whole = value.whole() if isinstance(value, ShardTensor) else value.detach()
    if session is None or session.mesh.pipeline == 1 or key not in session.homes:
        return whole
    mesh = session.mesh
    if isinstance(value, RemoteTensor):
        whole = torch.empty(value.shape, dtype=value.dtype, device=mesh.device)
    whole = whole.contiguous().to(mesh.device)
    dist.broadcast(whole, mesh.rank_of(session.owner(key)), group=mesh.pipeline_group)
    return whole


def whole_value(value: Any) -> Any:
    """A value of the state of a module inside of an optimized model, or made from its weights: in
    full, on the CPU. Collective for a shard.

    Raises GraphMisuse (GA407) for a tensor of another stage.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, RemoteTensor):
        raise GraphMisuse(
            what="full_state_dict() of a module inside of an optimized model, whose weights are in "
            "another stage",
            help_line="state = graphaccel.full_state_dict(model)  # of the whole model",
        )
    whole = value.whole() if isinstance(value, ShardTensor) else value.detach()
    return whole.cpu().clone()


class OptimizerState:
    """Hooks that make an optimizer's state dict that of the whole model.

    Saved: shards as DTensors. Loaded: DTensors, or full tensors (of the plain model's optimizer).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        meshes: Mapping[int, DeviceMesh],
    ) -> None:
        self._layouts: dict[int, ShardLayout] = {}
        self._meshes = meshes
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loaded)

    def add_layouts(self, layouts: Mapping[int, ShardLayout]) -> None:
        """Add layouts, by the identity of the parameter."""
        self._layouts |= layouts

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        built = {}
        layouts = self._by_key(optimizer, state)
        for number, values in state["state"].items():
            layout = layouts.get(number)
            built[number] = {
                key: presented(value, layout, self._meshes)
                if layout is not None and _has_shape(value, layout.local_shape)
                else value
                for key, value in values.items()
            }
        return {**state, "state": built}

    def _loaded(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        built = {}
        layouts = self._by_key(optimizer, state)
        for number, values in state["state"].items():
            layout = layouts.get(number)
            built[number] = {
                key: value if layout is None else self._own(value, layout)
                for key, value in values.items()
            }
        return {**state, "state": built}

    def _own(self, value: Any, layout: ShardLayout) -> Any:
        """This rank's shard of a value that may be a full tensor."""
        if isinstance(value, ShardTensor):
            return value.local if value.sharding == layout else layout.own(value.whole()).clone()
        if isinstance(value, DTensor):
            here = self._meshes[layout.mesh.pipeline_index]
            if value.device_mesh == here and list(value.placements) == placements(layout, here):
                return layout.filled(value.to_local())
            value = value.full_tensor()
        if _has_shape(value, layout.shape):
            return layout.own(value).clone()
        return value

    def _by_key(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[Any, ShardLayout]:
        """Key of a parameter in the state dict (a number, or its name) → its state's layout."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in state["param_groups"] for key in group["params"]]
        pairs = zip(keys, parameters, strict=False)
        return {key: self._layouts[id(p)] for key, p in pairs if id(p) in self._layouts}


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
