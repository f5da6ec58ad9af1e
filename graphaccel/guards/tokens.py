"""Tokens: the part of a Python value that is compared before a step."""

from __future__ import annotations

import ctypes
import enum
import math
from array import array
from collections import deque
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from graphaccel.guards.reads import kind_of

MISSING = object()
"""The value of an attribute that was looked up and did not exist."""

SCALARS = (bool, int, float, complex, str, bytes, type(None), type(...), slice, range)
PLAIN_TYPES = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum)
BUFFERS: tuple[Any, ...] = (
    array,
    ctypes.Array,
    ctypes.Structure,
    ctypes.Union,
    ctypes.c_int.__base__,  # of all plain C types
)
"""Types that hold numbers in memory of their own, which are written in place."""
FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_WITH_VALUES = frozenset(
    {"numpy", "datetime", "decimal", "fractions", "ipaddress", "pathlib", "uuid", "zoneinfo"}
)
"""Modules whose immutable objects are compared by their contents."""


def token_of(value: Any) -> Any:
    """The part of a value that is compared; contents of containers and objects are places of their
    own."""
    kind = type(value)
    if isinstance(value, float) and math.isnan(value):
        return kind, "nan"
    if isinstance(value, (*SCALARS, *PLAIN_TYPES)):
        return kind, value
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), value.device.type, value.requires_grad
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        return tuple(map(token_of, (kind, value.fget, value.fset, value.fdel)))
    if isinstance(value, FunctionType):  # that of a copy of the model may be a copy
        return value.__code__
    if isinstance(value, FUNCTIONS) or value is MISSING:
        return value
    if isinstance(value, dict):
        return kind_of(kind), tuple(map(key_of, list(value)))  # another thread may change it
    if isinstance(value, (list, tuple, deque)):
        return kind_of(kind), len(value)
    if isinstance(value, (set, frozenset)):
        return kind_of(kind), frozenset(map(key_of, list(value)))
    if isinstance(value, (bytearray, *BUFFERS)):
        return kind_of(kind), bytes(value)
    return (kind, value) if is_value(value) else kind_of(kind)


def values_of(value: Any) -> Any:
    """What is compared of a small tensor whose values the forward asks for; of one that is on
    another process, what was compared before."""
    return (torch.Tensor, value.tolist()) if isinstance(value, torch.Tensor) else value


def is_value(value: Any) -> bool:
    """Whether it is immutable and compared by its contents: a NumPy scalar, a Decimal, a date."""
    kind = type(value)
    if kind.__module__.partition(".")[0] not in _WITH_VALUES:
        return False
    return isinstance(value, Hashable) and kind.__eq__ is not object.__eq__


def key_of(key: Any) -> Any:
    """What a key of a container is known by: itself, or its class where it has no plain value."""
    return key if isinstance(key, (*SCALARS, *PLAIN_TYPES)) else kind_of(type(key))
