"""Objects that hold tensors in their attributes, opened so that pytree sees the tensors.

pytree knows tuples, dicts, named tuples and registered classes. Any other object that holds tensors
(a dataclass, a namespace, a batch of a class of the script, a distribution) is flattened to its
attributes; unflattening makes an object of the same class with them, without calling its
`__init__`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from graphaccel.compat.torch import pytree

PLAIN = (int, float, str, bool, type(None), torch.Size, torch.dtype, torch.device, Enum)
_CLOSED = (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, *PLAIN)


@dataclasses.dataclass(frozen=True)
class Opened:
    """An object of class `kind`; items: of a subclass of dict; attributes: of the object."""

    kind: type
    items: Mapping[Any, Any] | None
    attributes: Mapping[str, Any]


def opened(value: Any) -> Any:
    """A tree with the objects that hold tensors as `Opened`, which pytree flattens."""
    return _opened(value, frozenset())


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots included."""
    return dict(_slots(value)) | dict(getattr(value, "__dict__", {}))


def _flatten(opened: Opened) -> tuple[list[Any], Any]:
    items = opened.items or {}
    given = None if opened.items is None else tuple(items)
    values = [*items.values(), *opened.attributes.values()]
    return values, (opened.kind, given, tuple(opened.attributes))


def _with_keys(opened: Opened) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten(opened)
    _, given, names = context
    keys = [*map(pytree.MappingKey, given or ()), *map(pytree.GetAttrKey, names)]
    return list(zip(keys, values, strict=True)), context


def _unflatten(values: Any, context: Any) -> Any:
    kind, given, names = context
    built, following = kind.__new__(kind), iter(values)
    for key in given or ():
        ordered = OrderedDict if issubclass(kind, OrderedDict) else dict
        ordered.__setitem__(built, key, next(following))
    for name in names:
        object.__setattr__(built, name, next(following))
    return built


pytree.register_pytree_node(Opened, _flatten, _unflatten, flatten_with_keys_fn=_with_keys)


def _opened(value: Any, outer: frozenset[int]) -> Any:
    """outer: ids of objects around the value."""
    return pytree.tree_map(lambda leaf: _opened_leaf(leaf, outer), value)


def _opened_leaf(leaf: Any, outer: frozenset[int]) -> Any:
    if isinstance(leaf, _CLOSED) or id(leaf) in outer or _is_cache(leaf):
        return leaf
    outer = outer | {id(leaf)}
    attributes = {k: _opened(v, outer) for k, v in attributes_of(leaf).items()}
    items = {k: _opened(v, outer) for k, v in leaf.items()} if isinstance(leaf, dict) else None
    held = pytree.tree_leaves([attributes, items])
    if not any(isinstance(x, torch.Tensor) for x in held):
        return leaf
    return Opened(type(leaf), items, attributes)


def _is_cache(leaf: Any) -> bool:
    """Whether a leaf holds keys and values for generation: a training step has no use for them,
    and as outputs they would differ from layer to layer."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(leaf).__mro__)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in reversed(type(value).__mro__):
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
