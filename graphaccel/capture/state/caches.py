"""What a forward computes once and keeps: no traced tensors are left in it.

A cache of a function (`functools.lru_cache`) that a traced forward fills holds tensors without
data, which an eager forward or the next trace would read, and so does a buffer that the forward
makes. Each traced forward begins without them, and none remain after a capture.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from graphaccel.capture.objects import opened
from graphaccel.compat.torch import pytree
from graphaccel.guards.reads import is_inside, is_library

_CACHE = type(functools.lru_cache(len))


def caches_of(model: nn.Module) -> tuple[Any, ...]:
    """The cached functions in the classes of a model's modules, in the Python modules that define
    them, in those that these import, and in closures."""
    classes = {c for m in model.modules() for c in type(m).__mro__ if _is_followed(c.__module__)}
    spaces = {c.__module__ for c in classes}
    for name in tuple(spaces):
        values = vars(sys.modules[name]).values() if name in sys.modules else ()
        spaces |= {v.__name__ for v in values if isinstance(v, ModuleType) and _is_own(v)}
    values = [v for n in spaces if n in sys.modules for v in vars(sys.modules[n]).values()]
    values += [v for c in classes for v in vars(c).values()]
    values += [v for m in model.modules() for v in vars(m).values()]
    return tuple({id(c): c for c in _cached_in(values)}.values())


def forget_traced(caches: Iterable[Any]) -> None:
    """Clear those caches that hold traced tensors."""
    for cache in caches:
        if cache.cache_info().currsize and any(map(_is_traced, _results(cache))):
            cache.cache_clear()


def restore_buffers(module: nn.Module, before: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module the buffers that it had before its forward was traced."""
    module._buffers.clear()
    module._buffers.update(before)
    module._non_persistent_buffers_set &= before.keys()


def _cached_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        function = getattr(value, "__func__", value) if _is_method(value) else value
        if isinstance(function, _CACHE):
            yield function
        elif isinstance(function, FunctionType):
            cells = (c.cell_contents for c in function.__closure__ or () if _is_filled(c))
            for content in cells:
                if isinstance(content, _CACHE):
                    yield content


def _is_method(value: Any) -> bool:
    return isinstance(value, (staticmethod, classmethod))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # an empty cell
        return False


def _is_followed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not is_inside(file))


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not is_library(file)


def _results(cache: Any) -> list[Any]:
    """What a cache holds: the interpreter stores results in a dict, bounded ones in links."""
    stored: list[Any] = []
    for held in gc.get_referents(cache):
        if isinstance(held, dict):
            for entry in held.values():
                link = type(entry).__name__ == "_lru_list_elem"
                stored += gc.get_referents(entry) if link else [entry]
    return stored


def _is_traced(value: Any) -> bool:
    leaves = pytree.tree_leaves(opened(value))
    real = (torch.Tensor, nn.Parameter)
    return any(isinstance(x, torch.Tensor) and type(x) not in real for x in leaves)
