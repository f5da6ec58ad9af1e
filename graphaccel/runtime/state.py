"""State dicts of a model whose parameters lie on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from graphaccel.compat.torch import submesh
from graphaccel.runtime.remote import RemoteTensor
from graphaccel.runtime.session import Session


def stage_meshes(session: Session) -> dict[int, DeviceMesh]:
    """A device mesh of the ranks of each pipeline coordinate; all ranks call this together."""
    mesh = session.mesh
    if mesh.pipeline == 1:
        return {}
    return {
        p: submesh(mesh.device.type, [p * mesh.data + d for d in range(mesh.data)], mesh.rank)
        for p in range(mesh.pipeline)
    }


def sharded_state_dict(
    session: Session, meshes: Mapping[int, DeviceMesh], plain: MutableMapping[str, Any], prefix: str
) -> MutableMapping[str, Any]:
    """A state dict with the original names: what this rank holds as plain tensors, the rest as
    DTensors of full shape that lie on their owners' mesh and are empty here
    (torch.distributed.checkpoint reads and writes them where they are)."""
    for key, value in plain.items():
        if isinstance(value, RemoteTensor):
            owner = session.owner(key.removeprefix(prefix))
            local = torch.empty(0, dtype=value.dtype, device=value.device)
            plain[key] = DTensor.from_local(
                local,
                meshes[owner],
                [Replicate()],
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
    return plain


def full_state(session: Session, model: nn.Module, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Full tensors on the CPU, on every rank. Collective: all ranks call it."""
    mesh = session.mesh
    full: dict[str, Any] = {}
    for key, value in plain.items():
        if not isinstance(value, torch.Tensor):
            full[key] = value
        elif mesh.pipeline == 1 or key not in session.homes:
            full[key] = value.detach().cpu().clone()
        else:
            owner = session.owner(key)
            remote = isinstance(value, RemoteTensor)
            if remote:
                data = torch.empty(value.shape, dtype=value.dtype, device=mesh.device)
            else:
                data = value.detach().contiguous()
            dist.broadcast(data, owner * mesh.data + mesh.data_index, group=mesh.pipeline_group)
            full[key] = data.cpu().clone()
    return full
