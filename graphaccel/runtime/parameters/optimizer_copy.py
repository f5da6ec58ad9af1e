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
    """A copy with these groups and no state of parameters. It shares with the optimizer only what
    `shared_attribute` names."""
    kind = type(optimizer)
    built = kind.__new__(kind)
    vars(built).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    for name in _own_attributes(optimizer):
        setattr(built, name, _copied(getattr(optimizer, name)))
    built.param_groups = [
        {key: value if key == "params" else _copied(value) for key, value in group.items()}
        for group in groups
    ]
    built.state = defaultdict(dict)
    built.state.update({key: _copied(value) for key, value in state_of_all(optimizer).items()})
    drop_step_hooks(built)
    return built


def state_of_all(optimizer: Optimizer) -> dict[Any, Any]:
    """State that is kept under a name, and belongs to no parameter (`state["count"]`)."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def leave_values(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Free the state of a parameter that is not here, but for plain values: an optimizer may have
    set them when it was built, and read them of every parameter (Muon's `use_muon`)."""
    state = optimizer.state.pop(parameter, {})
    if values := {k: v for k, v in state.items() if isinstance(v, _VALUES)}:
        optimizer.state[parameter] = values


def shared_attribute(optimizer: Optimizer) -> str:
    """The name of an attribute, or setting of a group, that a copy would have to share, so that its
    steps could change the optimizer or its parameters; "" if there is none."""
    own = [(name, getattr(optimizer, name)) for name in _own_attributes(optimizer)]
    groups = [item for g in optimizer.param_groups for item in g.items() if item[0] != "params"]
    return next((name for name, value in (*own, *groups) if not _is_plain(value)), "")


def inner_optimizer(optimizer: Optimizer) -> str:
    """Where an optimizer holds another one, as `inner` or `parts[0]`; "" where it holds none."""
    return next(iter(inner_optimizers(optimizer)), "")


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that an optimizer holds, by attribute: `inner`, or `parts[0]` of several."""
    results: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        several: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            several = list(value.items()) if name not in ("state", "defaults") else []
        elif isinstance(value, (list, tuple)):
            several = list(enumerate(value)) if name != "param_groups" else []
        results |= {f"{name}[{key!r}]": one for key, one in several if isinstance(one, Optimizer)}
        if isinstance(value, Optimizer):
            results[name] = value
    return results


def _own_attributes(optimizer: Optimizer) -> list[str]:
    """Those beside groups, state and hooks, and beside what replaces a method."""
    methods, hooks = dir(type(optimizer)), "_optimizer_"
    known = ("param_groups", "state", "defaults", *methods)
    return [n for n in vars(optimizer) if n not in known and not n.startswith(hooks)]


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if _is_plain(value) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.is_leaf and value.numel() <= _LARGEST
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(map(_is_plain, value))
    return isinstance(value, _VALUES) and not isinstance(value, nn.Module)
