"""Converts frozen dataclasses to plain JSON data and back, by their type hints.

Supports the types that reports consist of: dataclasses, tuples, mappings with string keys, optional
fields, numbers, strings and booleans. Bytes stay integers, seconds floats.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings, numbers, booleans and None.

    Raises TypeError for a value of another type.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} is no plain data")


def from_plain(kind: type[T], data: Any) -> T:
    """The inverse of `to_plain` for a dataclass `kind`.

    Fields with a default may be missing: an older version did not write them. Raises ValueError for
    other missing or unknown fields, and for data of another type.
    """
    return _read(kind, data, kind.__name__)


def _read(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        return _read_any(arguments, data, where)
    if origin is tuple:
        return _read_tuple(arguments, data, where)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        _check(isinstance(data, Mapping), where, "an object")
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    if kind is float:
        _check(isinstance(data, (int, float)) and not isinstance(data, bool), where, "a number")
        return float(data)
    if kind is type(None):
        _check(data is None, where, "null")
        return None
    right = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    _check(right, where, f"of type {kind.__name__}")
    return data


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    _check(isinstance(data, Mapping), where, "an object")
    hints = get_type_hints(kind)
    names = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    _check(not set(data) - names, where, f"without {', '.join(sorted(set(data) - names))}")
    _check(not needed - set(data), where, f"with {', '.join(sorted(needed - set(data)))}")
    return kind(**{n: _read(hints[n], data[n], f"{where}.{n}") for n in names & set(data)})


def _read_any(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return _read(kind, data, where)
        except ValueError as problem:
            problems.append(str(problem))
    raise ValueError(" or ".join(problems))


def _read_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _check(isinstance(data, (list, tuple)), where, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    _check(len(data) == len(arguments), where, f"a list of {len(arguments)}")
    pairs = zip(arguments, data, strict=True)
    return tuple(_read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))


def _check(right: bool, where: str, wanted: str) -> None:
    if not right:
        raise ValueError(f"{where} is to be {wanted}")
