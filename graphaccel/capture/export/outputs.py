"""Flatten what a model returned, objects with tensors in their attributes included.

pytree knows tuples, dicts, named tuples and registered classes. Any other object that holds tensors
(a dataclass, a namespace, a distribution) is flattened to its attributes; unflattening makes an
object of the same class with them, without calling its `__init__`.
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

_PLAIN = (int, float, str, bool, type(None), torch.Size, torch.dtype, torch.device, Enum)
_CLOSED = (torch.Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, *_PLAIN)


class UnseenOutput(Exception):
    """The model returned an object of class `kind` in which `what` is not found."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"no {what} found in {kind}")
        self.kind, self.what = kind, what


@dataclasses.dataclass(frozen=True)
class _Opened:
    """An object of class `kind`; items: of a subclass of dict; attributes: of the object."""

    kind: type
    items: Mapping[Any, Any] | None
    attributes: Mapping[str, Any]


def _flatten(opened: _Opened) -> tuple[list[Any], Any]:
    items = opened.items or {}
    given = None if opened.items is None else tuple(items)
    values = [*items.values(), *opened.attributes.values()]
    return values, (opened.kind, given, tuple(opened.attributes))


def _unflatten(values: Any, context: Any) -> Any:
    kind, given, names = context
    built, following = kind.__new__(kind), iter(values)
    for key in given or ():
        ordered = OrderedDict if issubclass(kind, OrderedDict) else dict
        ordered.__setitem__(built, key, next(following))
    for name in names:
        object.__setattr__(built, name, next(following))
    return built


pytree.register_pytree_node(_Opened, _flatten, _unflatten)


def flatten_output(output: Any) -> tuple[list[Any], Any]:
    """The leaves of what a model returned, and the pytree spec that puts them together."""
    return pytree.tree_flatten(_opened(output, frozenset()))


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value that is the same in each step, to be kept as it is."""
    return isinstance(leaf, _PLAIN)


def output_names(output: Any) -> dict[int, str]:
    """Leaf number → the name by which the script calls it; `output` has numbers as leaves."""
    if isinstance(output, (tuple, list)) and not hasattr(output, "_fields"):
        named: Any = ((f"output[{place}]", value) for place, value in enumerate(output))
    else:
        named = _attributes(output).items()
        if isinstance(output, Mapping):
            named = (*named, *output.items())
    return {value: f"{name}" for name, value in named if isinstance(value, int)}


def _opened(value: Any, outer: frozenset[int]) -> Any:
    """The value with objects that hold tensors as `_Opened`. outer: ids of objects around it."""
    return pytree.tree_map(lambda leaf: _opened_leaf(leaf, outer), value)


def _opened_leaf(leaf: Any, outer: frozenset[int]) -> Any:
    if isinstance(leaf, _CLOSED) or id(leaf) in outer or _is_cache(leaf):
        return leaf
    outer = outer | {id(leaf)}
    attributes = {k: _opened(v, outer) for k, v in _attributes(leaf).items()}
    items = {k: _opened(v, outer) for k, v in leaf.items()} if isinstance(leaf, dict) else None
    held = pytree.tree_leaves([attributes, items])
    if not any(isinstance(x, torch.Tensor) for x in held):
        return leaf
    return _Opened(type(leaf), items, attributes)


def _is_cache(leaf: Any) -> bool:
    """Whether a leaf holds keys and values for generation: a training step has no use for them,
    and as outputs they would differ from layer to layer."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(leaf).__mro__)


def _attributes(value: Any) -> dict[str, Any]:
    return dict(_slots(value)) | dict(getattr(value, "__dict__", {}))


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in reversed(type(value).__mro__):
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
