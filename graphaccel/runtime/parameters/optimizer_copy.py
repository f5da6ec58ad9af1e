"""Copies of the user's optimizer, which step tensors of ours to show what its step does."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from graphaccel.compat.torch.optimizers import drop_step_hooks

Optimizer = torch.optim.Optimizer

_SHARED = (FunctionType, BuiltinFunctionType, type, torch.dtype, torch.device)
_VALUES = (bool, int, float, complex, str, bytes, type(None), *_SHARED)
_LARGEST = 2**16
"""Elements of a tensor that an optimizer keeps beside its state, to be copied with it."""


def copy_of(optimizer: Optimizer, *groups: dict[str, Any]) -> Optimizer:
    """A copy with these groups and no state. It shares with the optimizer only what
    `shared_attribute` names."""
    kind = type(optimizer)
    built = kind.__new__(kind)
    vars(built).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    for name in _own_attributes(optimizer):
        if _is_plain(value := getattr(optimizer, name)):
            setattr(built, name, copy.deepcopy(value))
    built.param_groups, built.state = list(groups), defaultdict(dict)
    drop_step_hooks(built)
    return built


def shared_attribute(optimizer: Optimizer) -> str:
    """The name of an attribute that a copy would have to share, so that its steps could change the
    optimizer or its parameters; "" if there is none."""
    own = _own_attributes(optimizer)
    return next((n for n in own if not _is_plain(getattr(optimizer, n))), "")


def inner_optimizer(optimizer: Optimizer) -> str:
    """The name of an attribute that is an optimizer itself; "" if there is none."""
    own = vars(optimizer).items()
    return next((n for n, value in own if isinstance(value, Optimizer) and n != "step"), "")


def _own_attributes(optimizer: Optimizer) -> list[str]:
    """Those beside groups, state and hooks, and beside what replaces a method."""
    methods, hooks = dir(type(optimizer)), "_optimizer_"
    known = ("param_groups", "state", "defaults", *methods)
    return [n for n in vars(optimizer) if n not in known and not n.startswith(hooks)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.is_leaf and value.numel() <= _LARGEST
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(map(_is_plain, value))
    return isinstance(value, _VALUES) and not isinstance(value, nn.Module)
