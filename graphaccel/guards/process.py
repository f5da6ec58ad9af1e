"""State of the process that a forward asks for: torch's flags, environment variables, and values
that a script sets on installed modules (`math.my_scale = 2.0`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from graphaccel.guards.reads import is_library
from graphaccel.guards.tokens import MISSING, PLAIN_TYPES, SCALARS

_ASKS = ("is_", "are_", "get_")
"""How the names of torch's functions begin that say a state of the process."""
_NOT_ASKED = tuple("autocast capturing compiling exporting rng_state scripting tracing".split())
"""Parts of the names of those whose answer is another one while a model is captured, or that the
plan decides."""
_FLAGS = "torch.backends"
_PYTHON = {
    "decimal": ("get", "is"),
    "faulthandler": ("is",),
    "gc": ("get", "is"),
    "locale": ("get",),
    "os": ("cpu_count", "get"),
    "posix": ("cpu_count", "get"),
    "sys": ("get", "is"),
    "threading": ("active", "get", "is"),
    "_thread": ("get",),
    "tracemalloc": ("get", "is"),
}
"""Python's modules whose functions say a state of the process, and how the names of those begin."""
_RUNNING = frozenset(
    "get_count get_objects get_stats get_traced_memory getallocatedblocks getloadavg getprofile "
    "gettrace getrandom".split()
)
"""Those whose answer changes by itself, or while a model is captured."""


@dataclass(frozen=True)
class Held:
    """Where a value of the process is: as the fields of `Place`."""

    name: str
    holder: Any = field(repr=False)
    key: Any
    how: str
    value: Any = field(repr=False)


def process_state(
    code: CodeType, names: Mapping[str, Any], texts: Collection[str], *, library: bool
) -> Iterator[Held]:
    """What a function's code may ask of the process. names: its globals and closure. texts: values
    that it may look up by `getattr(F, self.activation)`. library: whether it is of an installed
    package, whose reads of torch's flags alone are followed."""
    wanted = (*code.co_names, *(texts if "getattr" in code.co_names else ()))
    for name in (*code.co_names, *code.co_freevars):
        value = names.get(name, None if name in names else sys.modules.get(name))
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            yield from _answer(f"{getattr(value, '__module__', '')}.{name}", value, library)
        elif isinstance(value, ModuleType) and is_installed(value):
            yield from _of_module(value, wanted, library)
    if {"environ", "getenv"} & {*code.co_names} and not library:
        for key in texts_of(code):
            if key.isidentifier():
                now = os.environ.get(key, MISSING)
                yield Held(f"os.environ[{key!r}]", os.environ, key, "proxy", now)


def texts_of(code: CodeType) -> frozenset[str]:
    """The strings in a function's code: of names that it looks up by `getattr`, of keys."""
    several = [c for c in code.co_consts if isinstance(c, (tuple, frozenset))]
    values = [*code.co_consts, *(v for each in several for v in each)]
    return frozenset(v for v in values if isinstance(v, str))


def is_installed(value: ModuleType | type) -> bool:
    """Whether a module, or the module of a class, belongs to an installed package or to Python."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") != "__main__"
    return is_library(file)


def _of_module(root: ModuleType, wanted: Collection[str], library: bool) -> Iterator[Held]:
    """The values of an installed module, and of the modules in it, with these names."""
    if library and root.__name__.partition(".")[0] != "torch":
        return
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [(root.__name__, root)]
    while stack:
        text, holder = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        flags = text.startswith(_FLAGS)
        for name in wanted:
            value = _read(holder, name) if flags else vars(holder).get(name, MISSING)
            named = f"{text}.{name}"
            if isinstance(value, ModuleType) or (flags and _holds_flags(value)):
                stack.append((named, value))
            elif isinstance(value, (FunctionType, BuiltinFunctionType)):
                yield from _answer(named, value, library)
                if not library:
                    yield Held(named, vars(holder), name, "dict", value)
            elif flags and isinstance(value, SCALARS) and value is not None:
                yield Held(named, partial(_read, holder, name), "()", "call", value)
            elif not library and _may_be_set(value):
                yield Held(named, vars(holder), name, "dict", value)


def _answer(name: str, function: Any, library: bool) -> Iterator[Held]:
    """What a function says that takes no arguments and returns a plain value."""
    module = getattr(function, "__module__", None) or name
    last = name.rpartition(".")[2]
    if module.partition(".")[0] == "torch":
        asks = last.startswith(_ASKS) or last.endswith("_enabled")
        if not asks or any(part in last for part in _NOT_ASKED):
            return
    elif library or not last.startswith(_PYTHON.get(module, ())) or last in _RUNNING:
        return
    if library and last == "is_grad_enabled":  # true in a capture, whatever it is in the call
        return
    try:
        value = function()
    except Exception:  # it takes arguments, or asks for a device that is not there
        return
    if isinstance(value, (*SCALARS, *PLAIN_TYPES)):
        yield Held(f"{name}()", function, "()", "call", value)


def _may_be_set(value: Any) -> bool:
    """Whether it is a value as scripts set on a module."""
    return isinstance(value, (int, float, complex, str, torch.Tensor, np.ndarray))


def _holds_flags(value: Any) -> bool:
    return type(value).__module__.startswith(_FLAGS)


def _read(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, MISSING)
    except Exception:  # a flag of a device that is not there
        return MISSING
