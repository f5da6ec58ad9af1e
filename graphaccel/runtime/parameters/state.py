"""State dicts of a model and an optimizer whose tensors are spread over several ranks.

What this rank holds in full is a plain tensor; for the rest see `presented.py`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphaccel.compat.torch.distributed import submesh
from graphaccel.errors import GraphMisuse
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.presented import (
    part_of_state,
    placements,
    remote_part,
    shard_part,
)
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


def sharded_state_dict(
    session: Session, meshes: Mapping[int, DeviceMesh], plain: MutableMapping[str, Any], prefix: str
) -> MutableMapping[str, Any]:
    """A model's state dict with the original names: what this rank holds in full as plain tensors,
    shards and tensors of other ranks as DTensors of full shape."""
    for key, value in plain.items():
        name = key.removeprefix(prefix)
        if isinstance(value, ShardTensor):
            plain[key] = shard_part(value.local, value.sharding, meshes, of_optimizer=False)
        elif isinstance(value, RemoteTensor):
            layout = ShardLayout(value.shape, session.splits.get(name, ()), session.mesh)
            plain[key] = remote_part(value, layout, session.owner(name), meshes)
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


class _StateOfSome(dict):
    """The state of those parameters of which this process holds something, by their numbers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle. Raises PartOfModel (GA411)."""
        raise part_of_state(of_optimizer=True)

    def items(self) -> Any:
        """As of any dict. Raises PartOfModel (GA411) in an optimizer of all parameters, whose
        `load_state_dict` takes those that are missing here as new."""
        frame = sys._getframe(1)
        loads = frame.f_code.co_name == "load_state_dict"
        if loads and isinstance(frame.f_locals.get("self"), Optimizer):
            raise part_of_state(of_optimizer=True, loaded=True)
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateOfSome:
        return _StateOfSome({key: copy.deepcopy(value, memo) for key, value in self.items()})


class OptimizerState:
    """Hooks that make an optimizer's state dict that of the whole model.

    Saved: shards as DTensors, and nothing of other stages. Loaded: DTensors, or full tensors (of
    the plain model's optimizer), of which those of other stages are left out.
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
                key: shard_part(value, layout, self._meshes, of_optimizer=True)
                if layout is not None and _has_shape(value, layout.local_shape)
                else value
                for key, value in values.items()
            }
        return {**state, "state": _StateOfSome(built) if _elsewhere(optimizer, state) else built}

    def _loaded(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        built = {}
        layouts, elsewhere = self._by_key(optimizer, state), _elsewhere(optimizer, state)
        for number, values in state["state"].items():
            if number in elsewhere:
                continue
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
        """Key of a parameter in the state dict → its state's layout."""
        pairs = _keyed(optimizer, state)
        return {key: self._layouts[id(p)] for key, p in pairs if id(p) in self._layouts}


def _keyed(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each parameter and its key in the state dict: a number, or its name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    return zip(keys, parameters, strict=False)


def _elsewhere(optimizer: Optimizer, state: dict[str, Any]) -> set[Any]:
    """Keys of the parameters that other stages have."""
    return {key for key, p in _keyed(optimizer, state) if isinstance(p, RemoteTensor)}


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
