"""Detect tensors that a forward computes and keeps: for the next forward, or for the script."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphaccel.capture.export.watch import INSIDE
from graphaccel.capture.state.closures import held_by_module, memory_of
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.asserted import answer_of_check
from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.errors.messages import Location
from graphaccel.guards.places import STRUCTURE
from graphaccel.guards.reads import Reads, kind_of, line_of, paused

_UNLIKELY = 0.7548776662
"""Part of the numbers that are given as values of tensors: no running mean is at one of these."""
_MOST = 1000
"""How many values of tensors a forward gets."""

Path = tuple[Any, ...]
"""Attribute names, list indices and dict keys, from a model to something that it holds."""


@dataclass
class Ops(TorchDispatchMode):
    """Records the operators of one forward, the tensors they compute, and what they read of
    `before`. Where the forward asks for the value of a tensor, which has none, it gets a number,
    the same ones in each forward, so that what it does with numbers can be followed.

    before: storage key → tensor, of an earlier forward. names: the operators. numbers: those among
    their arguments. computed: storage key → tensor. read: storage key in `before` → the first line
    that reads it. written: lines that write to tensors that are neither in `own` (storages of
    weights, buffers, batch) nor computed by the forward. asked: how many values of tensors it asked
    for. shift: added to these numbers. argument: the name of what it puts into a container of its
    call. returned: the tensors that it returns. besides: leaf → value of what else it returns, and
    how many leaves there are. hooked: whether it sets a hook on a tensor.
    """

    own: frozenset[int] = frozenset()
    before: Mapping[int, torch.Tensor] = field(default_factory=dict)
    names: list[Any] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    computed: dict[int, torch.Tensor] = field(default_factory=dict)
    read: dict[int, Location | None] = field(default_factory=dict)
    written: dict[int, Location | None] = field(default_factory=dict)
    asked: int = 0
    shift: int = 0
    argument: str = ""
    returned: tuple[Any, ...] = ()
    besides: tuple[Mapping[int, Any], int] = field(default_factory=lambda: ({}, 0))
    hooked: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def note(self, returned: Any) -> None:
        """Note the structure of what the forward returned, a `capture.export.export.Returned`."""
        self.besides = returned.plain, returned.num_leaves

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked about twice as often as any op
            return args[0].device
        kwargs = kwargs or {}
        self.names.append(func)
        leaves = pytree.tree_leaves((args, kwargs))
        self.numbers += (x for x in leaves if type(x) is int or type(x) is float)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number(args[0].dtype)
        given = {memory_of(x) for x in leaves if isinstance(x, torch.Tensor)}
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

    def _number(self, dtype: torch.dtype) -> complex | float | int | bool:
        """A number for the value of a tensor. Of a condition, what lets a check pass; else True."""
        self.asked += 1
        if self.asked > _MOST:  # a loop until a value is small may never end
            raise RuntimeError("the forward asks for too many values of tensors")
        if dtype == torch.bool:
            answer = answer_of_check(INSIDE)
            return True if answer is None else answer
        if dtype.is_complex:
            return complex(self.asked + self.shift, _UNLIKELY)
        number = self.asked + self.shift
        return number + _UNLIKELY if dtype.is_floating_point else number


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


def unread_of(model: nn.Module, reads: Reads, kept: Collection[Path] = ()) -> tuple[Path, ...]:
    """`kept`, and paths to the other attributes of modules that the forward writes and does not
    read."""
    results = list(kept)
    for path, module in model.named_modules():
        kind = type(module)
        own = (module._parameters, module._buffers, module._modules, STRUCTURE, {"training"})
        for name in reads.written.get(kind_of(kind), {}).keys() - reads.of(kind).keys():
            computed = hasattr(getattr(kind, name, None), "__set__")
            to = (*filter(None, path.split(".")), name)
            inside = any(one[: len(to)] == to for one in kept)
            if not inside and not computed and not any(name in held for held in own):
                results.append(to)
    return tuple(results)


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
