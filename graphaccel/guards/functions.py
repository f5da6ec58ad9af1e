"""Finds the functions whose code ran: a frame refers to the code, not to the function.

Most are found by name, in their module or in the class of their first argument. The garbage
collector is asked for the others, since it looks at every object of the process.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

_LOCAL = "<locals>"
_PASSING = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
"""Functions that Python makes for one call."""
_CONSTANT = (type(None), bool, int, float, str, type(...))
_MOST_WRAPPERS = 20


@dataclass(frozen=True)
class Called:
    """Code that ran: its globals, and the class of its first argument where that may hold it."""

    code: CodeType
    names: dict[str, Any]
    owner: type | None = None


def called_in(frame: FrameType) -> Called:
    """The code of a frame that has just begun."""
    code = frame.f_code
    if not code.co_argcount or _LOCAL not in _qualified(code):
        return Called(code, frame.f_globals)
    first = frame.f_locals.get(code.co_varnames[0])
    return Called(code, frame.f_globals, first if isinstance(first, type) else type(first))


def functions_of(called: Sequence[Called]) -> dict[int, list[FunctionType]]:
    """By id of the code: its functions, where they may hold values in closures or defaults; one of
    them where all they hold are constants."""
    functions: dict[int, list[FunctionType]] = {}
    left = []
    for one in called:
        if not _may_hold_values(one.code):
            continue
        function = _named(one)
        if function is None:
            left.append(one.code)
        else:
            functions[id(one.code)] = [function]
    holders = _holders(left)
    if len(holders) > len(left):
        holders.clear()
        gc.collect()  # what nothing else holds any more may be there on some ranks alone
        holders = _holders(left)
    for function in holders:
        functions.setdefault(id(function.__code__), []).append(function)
    return functions


def _holders(wanted: list[CodeType]) -> list[FunctionType]:
    """The functions of these."""
    held = _referrers(wanted) if wanted else ()
    return [holder for holder in held if isinstance(holder, FunctionType)]


def functions_in(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Name → function, of the methods and properties in a class, decorated ones included."""
    for name, member in list(vars(cls).items()):
        for function in _unwrapped(member):
            yield name, function


def _may_hold_values(code: CodeType) -> bool:
    given = code.co_argcount + code.co_kwonlyargcount
    return code.co_name not in _PASSING and (bool(_free(code)) or given > 0)


def _free(code: CodeType) -> set[str]:
    return set(code.co_freevars) - {"__class__"}


def _named(one: Called) -> FunctionType | None:
    """A function of some code by its name; None where others may hold values that can change: the
    same `def` runs again in a loop, or for each call of the function around it."""
    *around, name = _qualified(one.code).split(".")
    if not name or _free(one.code):
        return None
    if _LOCAL not in around:
        members = [_member(functools.reduce(_member, around, one.names), name)]
    else:
        bases = () if one.owner is None else one.owner.__mro__
        members = [vars(base).get(name) for base in bases]
    first = next((f for m in members if (f := _of_code(m, one.code)) is not None), None)
    return None if first is None or _holds_objects(first) else first


def _holds_objects(function: FunctionType) -> bool:
    """Whether its defaults can change other than by assigning them."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not all(type(value) in _CONSTANT for value in defaults)


def _qualified(code: CodeType) -> str:
    """The qualified name of code; "" before Python 3.11."""
    return getattr(code, "co_qualname", "")


def _member(holder: Any, name: str) -> Any:
    names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return names.get(name)


def _of_code(value: Any, code: CodeType) -> FunctionType | None:
    """The function of some code in what a module or class holds: itself, or what it wraps."""
    return next((f for f in _unwrapped(value) if f.__code__ is code), None)


def _unwrapped(value: Any) -> Iterator[FunctionType]:
    for _ in range(_MOST_WRAPPERS):
        if isinstance(value, FunctionType):
            yield value
            value = value.__dict__.get("__wrapped__")
        elif isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif isinstance(value, property):
            for each in (value.fget, value.fset, value.fdel):
                if isinstance(each, FunctionType):
                    yield each
            return
        else:
            return


def _referrers(wanted: list[CodeType]) -> list[Any]:
    """What refers to these. The garbage collector does not look at objects that `gc.freeze()` has
    set apart, so they are put back; freezing again would also set apart what was created since
    then, and garbage among it would never be freed."""
    if gc.get_freeze_count():
        gc.unfreeze()
    return gc.get_referrers(*wanted)
