"""Runs a model's own forward where this rank has a part of its weights: each is gathered for the op
that reads it.

Every rank runs the same ops on the same inputs, so all of them gather the same weight at the same
time. A weight that is not kept is freed behind its op.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.errors import ElsewhereNeeded, RankLost, Unsupported
from graphaccel.errors.messages import line_of_script
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.execution.lost_rank import first_line, is_connection, modules_of
from graphaccel.runtime.parameters.module_hooks import inner_hooks
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor, ShardView
from graphaccel.runtime.parameters.state import whole_tensor
from graphaccel.runtime.session import Session

_PLAIN = (bool, int, float, str, type(None))


class GatherForReading(TorchDispatchMode):
    """While it is active, ops read parameters and buffers of the model in full.

    keep: whether gathered tensors are kept until it ends; without it one op's are held at a time.
    """

    def __init__(self, session: Session, model: nn.Module, *, keep: bool) -> None:
        super().__init__()
        self._session, self._keep = session, keep
        self._kept: dict[str, torch.Tensor] = {}
        self._not_full = _not_full(session, model)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run an op on full tensors. Raises Unsupported (GA208) where it writes into a weight."""
        kwargs = kwargs or {}
        if not any(map(self._is_not_full, pytree.tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._refuse_write(func, args, kwargs)
        args, kwargs = pytree.tree_map(self._read, (args, kwargs))
        return func(*args, **kwargs)

    def _is_not_full(self, value: Any) -> bool:
        return id(value) in self._not_full or isinstance(
            value, (RemoteTensor, ShardTensor, ShardView)
        )

    def _read(self, value: Any) -> Any:
        """A weight in full; any other value unchanged. Collective for a weight."""
        if id(value) not in self._not_full:
            if self._is_not_full(value):  # made from a weight before this mode was active
                raise ElsewhereNeeded(op="forward", location=line_of_script())
            return value
        name = self._not_full[id(value)][0]
        whole = self._kept.get(name)
        if whole is None:
            whole = self._gathered(name, value)
            if self._keep:
                self._kept[name] = whole
        return whole

    def _gathered(self, name: str, value: torch.Tensor) -> torch.Tensor:
        mesh = self._session.mesh
        try:
            return whole_tensor(self._session, name, value).to(mesh.device)
        except RuntimeError as error:
            if not is_connection(error):
                raise
            raise RankLost(
                rank=mesh.rank,
                stage=mesh.pipeline_index if mesh.pipeline > 1 else None,
                lost=mesh.other or "another rank",
                last_action="the op before, in a forward without gradients",
                waiting_for=f"`{name}`",
                cause=first_line(error),
                module=modules_of((name,)),
            ) from error

    def _refuse_write(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
        declared = func._schema.arguments
        given = {a.name: v for a, v in zip(declared, args, strict=False)} | dict(kwargs)
        for argument in declared:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for value in pytree.tree_leaves(given.get(argument.name)) if writes else ():
                if id(value) in self._not_full:
                    raise Unsupported(
                        what=f"a write into `{self._not_full[id(value)][0]}` in a forward without "
                        "gradients",
                        reason="this rank holds a part of it, and reads a copy of the rest",
                        help_line="write it outside of the forward, on every rank",
                    )


class Reading:
    """Calls of a model's own forward on gathered weights: those that no compiled program serves."""

    def __init__(self, model: nn.Module) -> None:
        self.active = False
        self._model = model
        self._shapes: set[Any] = set()

    @contextmanager
    def around(self, session: Session, *, keep: bool) -> Iterator[None]:
        """Calls of the model read gathered weights. keep: until the end, where memory suffices on
        all ranks. Collective."""
        mesh = session.mesh
        if keep and mesh.world > 1:
            room = torch.tensor(_room(self._model, mesh.device), device=mesh.device).int()
            with answered("the memory of all ranks"):
                dist.all_reduce(room, dist.ReduceOp.MIN)
            keep = bool(room)
        self.active = True
        try:
            with GatherForReading(session, self._model, keep=keep):
                yield
        finally:
            self.active = False

    def wanted(self, batch: Batch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an evaluation runs on gathered weights: it is given or returns what no graph has
        (a cache of keys and values), or has hooks on its modules, or its shape is new.

        A program is compiled for the first shape, and for others when they come a second time:
        lengths that grow with each call come once.
        """
        if self._model.training:  # which may write buffers
            return False
        if inner_hooks(self._model.named_modules()):
            return True
        if kwargs.get("use_cache") or not all(map(_is_input, (*args, *kwargs.values()))):
            return True
        known = len(self._shapes)
        self._shapes.add(batch.signature())
        return 0 < known < len(self._shapes)


def _is_input(value: Any) -> bool:
    """Whether graphs can have it as an input, which a cache of keys and values is not."""
    if isinstance(value, Mapping):
        return all(map(_is_input, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_input, value))
    return isinstance(value, (torch.Tensor, *_PLAIN))


def _room(model: nn.Module, device: torch.device) -> bool:
    """Whether a quarter of the memory that a rank has to itself holds all weights."""
    needed = sum(p.numel() * p.element_size() for p in nn.Module.parameters(model))
    if device.type == "cuda":
        return 4 * needed <= torch.cuda.mem_get_info(device)[0]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return 4 * needed * ranks <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _not_full(session: Session, model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Parameters and buffers that some rank of a replica lacks, or that are on the host: identity →
    name, and the tensor. Equal on all ranks but for identities."""
    mesh = session.mesh
    named = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    results: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        stages = {stage % mesh.pipeline for stage in session.homes.get(name, range(mesh.pipeline))}
        elsewhere = len(stages) < mesh.pipeline or isinstance(tensor, ShardTensor)
        if elsewhere or name in session.parameters or tensor.device != mesh.device:
            results.setdefault(id(tensor), (name, tensor))
    return results
