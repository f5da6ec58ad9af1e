"""Deep copies of a model that include functions: closures, bound methods, partials.

`copy.deepcopy` does not copy functions: a lambda that a module holds (minGPT's `self.mlpf = lambda
x: m.c_proj(m.act(m.c_fc(x)))`) then still calls the modules of the original. Here a function whose
closure or defaults reach the model is copied so that it refers to the copy; so are bound methods,
and functions in partials and containers.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from graphaccel.compat.torch.tensors import storage_key
from graphaccel.guards.attributes import PROXIES, target_of


class _Memo(dict):
    """The memo of a deep copy that includes functions.

    modules: ids of the modules that are copied. storages: storage keys of their tensors.
    """

    def __init__(self, known: Mapping[int, Any], modules: Iterable[nn.Module]) -> None:
        super().__init__(known)
        self.modules = set(map(id, modules))
        self.storages: set[int] = set()


def copied(value: Any, known: Mapping[int, Any], modules: Iterable[nn.Module]) -> Any:
    """A deep copy of `value`: a module, or a dict of dicts of attributes.

    known: id of an object → its replacement in the copy. modules: a function that reaches one of
    these, or a tensor of theirs, is copied too. An attribute that cannot be copied (a lock, a file,
    a dict that answers every attribute) is shared.
    """
    owners = tuple(modules)
    memo = _Memo(known, owners)
    for module in owners:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                memo.storages.add(memory_of(tensor))
    with _functions_follow():
        try:
            return copy.deepcopy(value, copy.copy(memo))
        except Exception:  # a class may raise anything
            shared = [one for one in _attributes_in(value) if not _can_be_copied(one, memo)]
            memo.update((id(one), one) for one in shared)
            return copy.deepcopy(value, memo)


def _attributes_in(value: Any) -> Iterator[Any]:
    """The attributes of modules that a copy would copy."""
    holders = map(vars, value.modules()) if isinstance(value, nn.Module) else value.values()
    for holder in holders:
        yield from (v for k, v in holder.items() if k not in _OWN and not isinstance(v, _PLAIN))


def _can_be_copied(value: Any, memo: _Memo) -> bool:
    try:
        copy.deepcopy(value, copy.copy(memo))
    except Exception:
        return False
    return True


def functions_follow(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """In shallow copies of some of a model's modules (old → new), redirect functions that reach one
    of the old ones to the new one, in place."""
    memo = _Memo({}, new)
    for module in new:
        own = (*module._parameters.values(), *module._buffers.values())
        memo.storages.update(memory_of(t) for t in own if t is not None)
    known: dict[int, Any] = {}
    for module in new.values():
        for name, value in list(vars(module).items()):
            if name in _OWN or isinstance(value, _PLAIN) or not _reaches(value, memo):
                continue
            if not known:
                tensors = (*nn.Module.parameters(model), *model.buffers())
                known = {id(one): one for one in (*model.modules(), *tensors)}
                known |= {id(old): built for old, built in new.items()}
            module.__dict__[name] = copied(value, known, new)


@contextmanager
def _functions_follow() -> Iterator[None]:
    """A context in which `copy.deepcopy` with a `_Memo` also copies functions."""
    table: dict[type, Any] = {FunctionType: _copied_function, MethodType: _copied_method}
    table |= dict.fromkeys((weakref.ref, *PROXIES), _copied_reference)
    # Since Python 3.14 types that are never copied are looked up first, in a set.
    atomic = getattr(copy, "_atomic_types", None)
    with patch.dict(copy._deepcopy_dispatch, table):  # type: ignore[attr-defined]
        if atomic is None:
            yield
            return
        with patch.object(copy, "_atomic_types", atomic - set(table)):
            yield


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if not isinstance(memo, _Memo) or not _reaches(function, memo):
        return function
    cells = tuple(_copied_cell(cell, memo) for cell in function.__closure__ or ())
    function_type = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells or None
    )
    functools.update_wrapper(function_type, function)
    vars(function_type).pop("__wrapped__", None)
    memo[id(function)] = function_type  # before its contents, which may refer to it
    function_type.__dict__.update(copy.deepcopy(vars(function), memo))
    function_type.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    function_type.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    for new, old in zip(cells, function.__closure__ or (), strict=True):
        if new is not old and _is_filled(old) and not _is_filled(new):
            new.cell_contents = copy.deepcopy(old.cell_contents, memo)
    return function_type


def _copied_cell(cell: CellType, memo: _Memo) -> CellType:
    """The cell itself where it does not reach the model; else an empty one, filled later."""
    if not _is_filled(cell) or not _reaches(cell.cell_contents, memo):
        return cell
    return memo.setdefault(id(cell), CellType())


def _copied_method(method: MethodType, memo: dict[int, Any]) -> MethodType:
    function = copy.deepcopy(method.__func__, memo)
    return type(method)(function, copy.deepcopy(method.__self__, memo))


def _copied_reference(reference: Any, memo: dict[int, Any]) -> Any:
    """A weak reference, or a proxy, to the copy of what it refers to."""
    referent = target_of(reference)
    if referent is None or not isinstance(memo, _Memo) or not _reaches(referent, memo):
        return reference
    copied = copy.deepcopy(referent, memo)
    return weakref.proxy(copied) if isinstance(reference, PROXIES) else weakref.ref(copied)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _reaches(value: Any, memo: _Memo) -> bool:
    """Whether a value holds a module of the model, or a tensor that shares storage with its
    tensors."""
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if id(one) in memo.modules:
            return True
        if isinstance(one, torch.Tensor):
            if memory_of(one) in memo.storages:
                return True
            continue
        stack.extend(_held_by(one))
    return False


def memory_of(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share storage."""
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or without storage
        return id(tensor)


@dataclass(frozen=True)
class Held:
    """An object that a module holds.

    path: attribute names, indices and keys from the module to it. closed: whether the path goes
    through a closure, or another object that `read_attribute` does not enter.
    """

    path: tuple[str, ...]
    value: Any
    closed: bool


def held_by_module(module: nn.Module) -> Iterator[Held]:
    """Everything that a module holds, each object once, nearest first: submodules, tensors,
    attributes, their contents, and closures of their functions."""
    seen = {id(module): module}
    queue = deque([Held((), module, False)])
    while queue:
        one = queue.popleft()
        for name, value in _named_by(one.value):
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            seen[id(value)] = value
            into = isinstance(one.value, (nn.Module, Mapping, list, tuple))
            held = Held((*one.path, name), value, one.closed or not into)
            yield held
            if not isinstance(value, torch.Tensor):
                queue.append(held)


def read_attribute(module: nn.Module, path: str) -> Any:
    """The object at `path` (`"blocks.0.table"`, of names, list indices and dict keys) in a
    module."""
    value: Any = module
    for part in path.split("."):
        if isinstance(value, nn.Module):
            value = getattr(value, part)
        elif isinstance(value, Mapping):
            value = next(v for k, v in value.items() if str(k) == part)
        else:
            value = value[int(part)]
    return value


def _held_by(value: Any) -> list[Any]:
    return [held for _, held in _named_by(value)]


def _named_by(value: Any) -> list[tuple[str, Any]]:
    """The contents of a value, with names: items of a container, closure cells, attributes."""
    if isinstance(value, nn.Module):
        plain = [(k, v) for k, v in vars(value).items() if k not in _OWN]
        own = (value._parameters, value._buffers, value._modules)
        return [*(item for held in own for item in held.items()), *plain]
    if isinstance(value, FunctionType):
        pairs = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        cells = [(name, c.cell_contents) for name, c in pairs if _is_filled(c)]
        defaults = [("a default", v) for v in value.__defaults__ or ()]
        return [*cells, *defaults, *(value.__kwdefaults__ or {}).items(), *vars(value).items()]
    if type(value) in (weakref.ref, *PROXIES):
        return [("the referent", target_of(value))]
    if isinstance(value, MethodType):
        return [("__func__", value.__func__), ("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        arguments = [("an argument", v) for v in value.args]
        return [("func", value.func), *arguments, *value.keywords.items()]
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(str(i), v) for i, v in enumerate(value)]
    if isinstance(value, (type, ModuleType, torch.Tensor)):
        return []
    return list(getattr(value, "__dict__", {}).items())


_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, submodules and hooks."""

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
