"""Attributes of an object besides its `__dict__`, and what a script sets on tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from graphaccel.compat.torch.fakes import attributes_of_fakes
from graphaccel.guards.tokens import SCALARS

PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


def target_of(reference: Any) -> Any:
    """What a weak reference or a proxy refers to; None where that is gone."""
    if isinstance(reference, weakref.ref):
        return reference()
    try:
        return reference.__init__.__self__
    except ReferenceError:
        return None


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those in slots."""
    own = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if hasattr(value, name):
                own[name] = getattr(value, name)
    return own


def slots_of(cls: type) -> Iterator[str]:
    """The names of the slots of a class."""
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def has_default(cls: type, name: str) -> bool:
    """Whether an instance without this attribute has the one of its class."""
    return any(name in vars(base) for base in cls.__mro__ if base is not object)


def alias_of(cls: type, name: str) -> str | None:
    """The attribute that is actually read where a class's own `__getattribute__` redirects a name,
    by a table of names in the class."""
    if cls.__getattribute__ is object.__getattribute__:
        return None
    for base in cls.__mro__:
        for table in vars(base).values():
            if isinstance(table, dict) and isinstance(table.get(name), str):
                return table[name]
    return None


def values_on(tensor: torch.Tensor) -> dict[str, Any]:
    """The plain values and tensors that a script has set on a tensor, as `weight.mult = 0.5`."""
    own = attributes_of_fakes()
    held = vars(tensor).items()
    plain = (*SCALARS, torch.Tensor)
    return {k: v for k, v in held if isinstance(v, plain) and k not in own and k[:2] != "__"}


def follow_values(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Let a copy of a tensor have the values that a script has set on it now."""
    for gone in values_on(copy):
        delattr(copy, gone)
    vars(copy).update(values_on(tensor))
