"""Which values the walk of `guards.places` follows, and how."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution
from torch.optim.lr_scheduler import LRScheduler

from graphaccel.guards.tokens import FUNCTIONS, MISSING, PLAIN_TYPES, SCALARS, is_value

DEPTH = 6
"""How many containers and objects deep values are followed."""
OPAQUE = frozenset(
    {"torch", "graphaccel", "builtins", "threading", "_thread", "weakref", "logging", "re"}
)
"""Packages whose objects are not followed, except for a few kinds."""


class ClassKey(str):
    """The name of a class attribute, which is replaced by `setattr` on the class."""

    def __new__(cls, owner: type, name: str) -> ClassKey:
        built = super().__new__(cls, name)
        built.owner = owner
        return built

    owner: type


ANSWERS: tuple[tuple[type, str], ...] = (
    (logging.Logger, "getEffectiveLevel"),
    (queue.Queue, "qsize"),
    (threading.Event, "is_set"),
)
"""Classes of Python's, with the method that says what a forward may ask of an object."""


def is_object(value: Any) -> bool:
    """Whether it is an object whose attributes are values."""
    kind = type(value)
    plain = (*SCALARS, *PLAIN_TYPES, *FUNCTIONS, torch.Tensor, nn.Module, np.ndarray, np.generic)
    if isinstance(value, (*plain, ModuleType, MethodType, functools.partial, dict, list, tuple)):
        return False
    if isinstance(value, (threading.local, torch.optim.Optimizer, LRScheduler, Distribution)):
        return True
    if is_value(value):
        return False
    return kind.__module__.split(".")[0] not in OPAQUE and bool(
        hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    )


def content_of(cell: CellType) -> Any:
    """What a closure's cell holds; MISSING for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def held_by_function(function: Any) -> Iterator[tuple[str, Any, Any, str, Any]]:
    """Name, holder, key, how (as of a `Place`) and value, of what a function, or the function of a
    method, holds in its closure and defaults."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        if name != "__class__" and (value := content_of(cell)) is not MISSING:
            yield name, cell, name, "cell", value
    for name in ("__defaults__", "__kwdefaults__"):
        if value := getattr(function, name):
            yield name, function, name, "attribute", value


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it is a scalar, tensor or array, or a container of them."""
    if isinstance(value, (*SCALARS, *PLAIN_TYPES, torch.Tensor, np.ndarray)) or is_value(value):
        return True
    if depth > DEPTH:
        return False
    if isinstance(value, dict):
        return all(is_plain(v, depth + 1) for v in value.values())
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return all(is_plain(v, depth + 1) for v in value)
    return False
