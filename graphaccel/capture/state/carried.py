"""Detect tensors that a forward computes and keeps: for the next forward, or for the script."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphaccel.capture.state.closures import held_by_module, memory_of
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.errors.messages import Location
from graphaccel.guards.reads import line_of, paused

Path = tuple[str, ...]
"""Attribute names, list indices and dict keys, from a model to something that it holds."""


@dataclass
class Ops(TorchDispatchMode):
    """Records the operators of one forward, the tensors they compute, and what they read of
    `before`.

    before: storage key → tensor, of an earlier forward. names: the operators. computed: storage key
    → tensor. read: storage key in `before` → the first line that reads it. written: lines that
    write to tensors that are neither in `own` (storages of weights, buffers, batch) nor computed by
    the forward.
    """

    own: frozenset[int] = frozenset()
    before: Mapping[int, torch.Tensor] = field(default_factory=dict)
    names: list[Any] = field(default_factory=list)
    computed: dict[int, torch.Tensor] = field(default_factory=dict)
    read: dict[int, Location | None] = field(default_factory=dict)
    written: dict[int, Location | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked about twice as often as any op
            return args[0].device
        kwargs = kwargs or {}
        self.names.append(func)
        given = {memory_of(t) for t in _tensors((args, kwargs))}
        for key in given & self.before.keys() - self.read.keys():
            self.read[key] = line_of(sys._getframe(1))
        for tensor in _written(func, args, kwargs):
            key = memory_of(tensor)
            if key not in self.own and key not in self.computed and key not in self.written:
                self.written[key] = line_of(sys._getframe(1))
        with paused():
            result = func(*args, **kwargs)
        for tensor in _tensors(result):
            key = memory_of(tensor)
            if key not in given:
                self.computed[key] = tensor
        return result


def kept_by(
    model: nn.Module, computed: Mapping[int, torch.Tensor], buffers: Collection[str]
) -> dict[Path, int]:
    """Path from the model → storage key, of the tensors in `computed` that its modules hold.

    buffers: names of those that the model had before its forwards, in the same shape; others, they
    made."""
    own = {memory_of(t) for t in nn.Module.parameters(model)}
    own |= {memory_of(t) for name, t in model.named_buffers() if name in buffers}
    return {
        held.path: key
        for held in held_by_module(model)
        if isinstance(held.value, torch.Tensor)
        and (key := memory_of(held.value)) in computed
        and key not in own
    }


def name_of(model: nn.Module, key: int) -> str:
    """The model's name of the tensor with a storage key; "" if it does not hold it."""
    for held in held_by_module(model):
        if isinstance(held.value, torch.Tensor) and memory_of(held.value) == key:
            return ".".join(held.path)
    return ""


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))


def _written(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operator writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
