"""Enumerates the places of the Python values that a forward reads, with their values.

`places(model, reads)` walks modules, their plain objects and containers, globals, closures and
defaults. The same walk of a copy of the model gives the same names with the values of the copy.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import sys
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.guards.attributes import (
    PROXIES,
    alias_of,
    attributes_of,
    has_default,
    slots_of,
    target_of,
    values_on,
)
from graphaccel.guards.followed import (
    ANSWERS,
    DEPTH,
    OPAQUE,
    ClassKey,
    content_of,
    held_by_function,
    is_object,
    is_plain,
)
from graphaccel.guards.functions import functions_in
from graphaccel.guards.lines import Read
from graphaccel.guards.place import Place
from graphaccel.guards.process import is_installed, process_state
from graphaccel.guards.reads import Reads, Scope, kind_of
from graphaccel.guards.tokens import MISSING, PLAIN_TYPES, SCALARS

STRUCTURE = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}) - {"training"}
"""Attributes of modules that are not Python values: tensors, submodules, hooks, and the second list
of its weights that a recurrent layer keeps."""


_ORIGINAL = "_graphaccel_original"
"""An attribute of the class that an optimized model has, which is none of the script's."""


def places(model: nn.Module, reads: Reads, live: nn.Module | None = None) -> dict[str, Place]:
    """Name → place, of all that was read.

    live: the user's model, where `model` is a copy. Functions of either may have run, and of other
    copies on fakes; the weights that they reach are not Python state.
    """
    walk = _Walk(model, reads)
    for other in (*reads.copies, *(() if live is None else (live,))):
        walk.leave_out(other)
    for path, module in model.named_modules():
        walk.module(path, module)
    walk.outside()
    for scope in reads.scopes:
        walk.scope(scope)
    for name, root in reads.roots.items():
        walk.value(name, reads.roots, name, "dict", root, None, 0, True)
    for scope in reads.scopes:
        walk.process(scope)
    return walk.places


def objects_of(model: nn.Module, *others: Any) -> set[type]:
    """The classes of the plain objects that modules hold, also inside containers and objects; and
    of those in `others`."""
    results: set[type] = set()
    seen: set[int] = set()
    stack = [(v, 0) for m in model.modules() for k, v in vars(m).items() if k not in STRUCTURE]
    stack += [(other.__self__ if isinstance(other, MethodType) else other, 0) for other in others]
    while stack:
        value, depth = stack.pop()
        if type(value) in (weakref.ref, *PROXIES):
            value = target_of(value)
        if id(value) in seen or depth > DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            stack += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, (list, tuple, deque)):
            stack += [(v, depth + 1) for v in value]
        elif is_object(value):
            results.add(type(value))
            stack += [(v, depth + 1) for v in attributes_of(value).values()]
    return results


class _Walk:
    def __init__(self, model: nn.Module, reads: Reads) -> None:
        self.places: dict[str, Place] = {}
        self._reads, self._names, self._looked_up = reads, reads.names, reads.looked_up
        self._own: set[int] = set()
        self._modules: set[int] = set()
        self._left_out: set[int] = set()
        self._classes: dict[type, str] = {}
        self._ran = {id(s.code) for s in reads.scopes}
        self.leave_out(model)
        self._done: set[tuple[int, Any]] = set()

    def leave_out(self, model: nn.Module) -> None:
        """Exclude parameters, buffers and modules of a model that something else also holds."""
        self._own |= {id(t) for t in (*nn.Module.parameters(model), *model.buffers())}
        self._left_out |= {id(m) for m in model.modules()}
        self._modules |= self._left_out

    def outside(self) -> None:
        """Begin with what the model does not hold, under names of its own: a copy of the model does
        not hold the objects that the model shares with it."""
        self._done.clear()
        self._modules = set(self._left_out)

    def _stranger(self, text: str, module: nn.Module, line: Read) -> None:
        """Places of a module outside of the model (a criterion, a teacher), with its tensors."""
        if id(module) in self._modules:
            return
        self._modules |= {id(m) for m in module.modules()}
        for path, inner in module.named_modules():
            start = f"{text}.{path}" if path else text
            self.module(start, inner, shared=True)
            for own in (inner._parameters, inner._buffers):
                for name, tensor in own.items():
                    if isinstance(tensor, torch.Tensor) and id(tensor) not in self._own:
                        place = Place(f"{start}.{name}", own, name, "dict", tensor, line, True)
                        self._keep(place)

    def module(self, path: str, module: nn.Module, *, shared: bool = False) -> None:
        """Places of the attributes of a module that were read, and of its children's classes."""
        own, start = vars(module), f"{path}." if path else ""
        names = self._reads.of(type(module))
        for child, inner in module._modules.items():
            self._keep(Place(f"{start}{child}", module._modules, child, "dict", inner))
        for name in [n for n, buffer in module._buffers.items() if buffer is None]:
            self._keep(Place(f"{start}{name}", module._buffers, name, "dict", None))
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and (vars(tensor) or self._reads.missing):
                    self._of_tensor(f"{start}{key}", tensor, shared)
        if path:  # of the model itself, what is called is graphaccel's
            self._method(f"{start}forward", type(module), own, "forward", names.get("forward"))
        self._of_classes(type(module))
        for name in self._wanted(own, names):
            if name in STRUCTURE or hasattr(nn.Module, name):
                continue
            if any(name in t for t in (module._parameters, module._buffers, module._modules)):
                continue
            self._attribute(f"{start}{name}", module, own, name, names.get(name), 0, shared)

    def _wanted(self, own: Mapping[str, Any], names: Mapping[str, Read]) -> Iterable[str]:
        """The attributes to follow of what has `own`, of which `names` were read."""
        if "__dict__" in names:
            return {**own, **dict.fromkeys(self._reads.texts)}
        return (*names, *(self._looked_up & own.keys()))

    def _of_tensor(self, text: str, tensor: torch.Tensor, shared: bool) -> None:
        """Values that a script has set on a parameter or a buffer, as `weight.mult`."""
        own = vars(tensor)
        for name in values_on(tensor).keys() & self._names:
            self.value(f"{text}.{name}", own, name, "dict", own[name], None, 1, shared)
        for name in self._reads.missing.keys() - own.keys():
            line = self._reads.missing[name]
            self._keep(Place(f"{text}.{name}", own, name, "dict", MISSING, line, shared))

    def _of_classes(self, kind: type) -> None:
        """Methods and properties that ran, also by `super()` and operators, and plain values of the
        script's classes, which `type(self).scale` reads unrecorded."""
        for cls in kind.__mro__:
            own = vars(cls)
            if (id(cls), "") in self._done or cls.__module__.partition(".")[0] in OPAQUE:
                continue
            if _ORIGINAL in own:
                continue
            self._done.add((id(cls), ""))
            text = self._named(cls)
            for name, function in functions_in(cls):
                if id(function.__code__) in self._ran:
                    line = (function.__code__, name)
                    self._member(text, cls, name, line)
                    self._function(f"{text}.{name}", function, line, 0, True)
            for name in () if is_installed(cls) else self._names & own.keys():
                if isinstance(own[name], SCALARS) and not name.startswith("__"):
                    self._member(text, cls, name, None)

    def _named(self, cls: type) -> str:
        """The name of a class, with a number where others have the same."""
        if cls not in self._classes:
            text = f"{cls.__module__}.{cls.__qualname__}"
            number = sum(known.partition("#")[0] == text for known in self._classes.values())
            self._classes[cls] = f"{text}#{number}" if number else text
        return self._classes[cls]

    def _member(self, text: str, cls: type, name: str, line: Read) -> None:
        key, value = ClassKey(cls, name), vars(cls)[name]
        self._keep(Place(f"{text}.{name}", vars(cls), key, "dict", value, line, True))

    def _attribute(
        self, text: str, holder: Any, own: Any, name: str, line: Read, depth: int, shared: bool
    ) -> None:
        if name in own:
            if isinstance(getattr(type(holder), name, None), FunctionType):
                self._method(text, type(holder), own, name, line)
            self.value(text, own, name, "dict", own[name], line, depth, shared)
            return
        for cls in type(holder).__mro__:
            if name in vars(cls):
                value = vars(cls)[name]
                if isinstance(value, FunctionType):
                    self._method(text, type(holder), own, name, line)
                    return
                if cls.__module__.split(".")[0] not in OPAQUE and not hasattr(value, "__get__"):
                    gone = Place(f"{text} of the instance", own, name, "dict", MISSING, line)
                    self._keep(gone)
                    key = ClassKey(cls, name)
                    self.value(text, vars(cls), key, "dict", value, line, depth, True)
                elif self._computes(holder, value):
                    self._computed(text, holder, name, line)
                return
        if (id(own), name) not in self._done:
            self._done.add((id(own), name))
            self._keep(Place(text, own, name, "dict", MISSING, line, shared))

    def _computes(self, holder: Any, value: Any) -> bool:
        """Whether an attribute of a class is Python code whose reads are not recorded: a descriptor
        with a table of its own, a property of an object that the model does not hold."""
        if isinstance(value, property):
            known = isinstance(holder, nn.Module) or kind_of(type(holder)) in self._reads.noted
            return not known
        return isinstance(getattr(type(value), "__get__", None), FunctionType)

    def _computed(self, text: str, holder: Any, name: str, line: Read) -> None:
        try:
            value = getattr(holder, name)
        except Exception:  # the script's own code, which the forward may not reach
            return
        if isinstance(value, (*SCALARS, *PLAIN_TYPES)):
            read = functools.partial(getattr, holder, name)
            self._keep(Place(text, read, "()", "call", value, line))

    def _method(self, text: str, kind: type, own: Any, name: str, line: Read) -> None:
        """A method, which may be replaced on the instance, and on a class that is not torch's."""
        set_on_it = own.get(name, MISSING)
        self._keep(Place(f"{text} of the instance", own, name, "dict", set_on_it, line))
        self._function(f"{text} of the instance", set_on_it, line, 0, False)
        cls = next((c for c in kind.__mro__ if name in vars(c)), None)
        if cls is not None and cls.__module__.split(".")[0] not in OPAQUE:
            self._member(self._named(cls), cls, name, line)

    def scope(self, scope: Scope) -> None:
        """Places of the globals, closures and defaults of a function that ran."""
        code, names = scope.code, scope.names
        module = names.get("__name__", "")
        looked_up = self._reads.texts if "globals" in code.co_names else ()
        absent = scope.absent.union(looked_up) - names.keys()
        for name in (*code.co_names, *looked_up):
            if name in names and not name.startswith("__"):
                self._outside(f"{module}.{name}", names, name, "dict", names[name], scope)
            elif name in absent:
                place = Place(f"{module}.{name}", names, name, "dict", MISSING, (code, name), True)
                self._keep(place)
            elif is_plain(value := vars(builtins).get(name, MISSING)):  # set there by a script
                self._outside(f"builtins.{name}", vars(builtins), name, "dict", value, scope)
            elif name in sys.modules and name not in names:  # imported by the function itself
                self._outside(name, sys.modules, name, "dict", sys.modules[name], scope)
        for number, function in enumerate(scope.functions):
            each = f"#{number}" if number else ""
            start = f"{module}.{function.__qualname__}{each}"
            for name, holder, key, how, value in held_by_function(function):
                if how == "cell" or not scope.library:
                    self._outside(f"{start}.{name}", holder, key, how, value, scope)

    def process(self, scope: Scope) -> None:
        """Places of the process's state that a function that ran asks for; last, since it may look
        up what the model's values name."""
        texts = {p.value for p in self.places.values() if type(p.value) is str}
        cells = [
            pair
            for function in scope.functions
            for pair in zip(scope.code.co_freevars, function.__closure__ or (), strict=False)
        ]
        names = {**scope.names, **{name: content_of(cell) for name, cell in cells}}
        for held in process_state(scope.code, names, texts, library=scope.library):
            line = (scope.code, held.name.rpartition(".")[2].removesuffix("()"))
            self._keep(Place(held.name, held.holder, held.key, held.how, held.value, line, True))

    def _outside(
        self, text: str, holder: Any, key: Any, how: str, value: Any, scope: Scope
    ) -> None:
        """A place outside of the model: for a library's values, plain values only."""
        follows = not scope.library
        if isinstance(value, (ModuleType, type)):
            if follows and not is_installed(value):
                self._namespace(text, value, scope)
            return
        if not (follows or is_plain(value)):
            return
        line = (scope.code, key)
        self.value(text, holder, key, how, value, line, 0, True)

    def _namespace(self, text: str, holder: Any, scope: Scope) -> None:
        """Places of a module or a class whose attributes are read as constants."""
        for name in self._names:
            line = (scope.code, name)
            if isinstance(holder, type):
                self._of_class(f"{text}.{name}", holder, name, line)
                continue
            value = vars(holder).get(name, MISSING)
            if isinstance(value, ModuleType) and id(value) not in self._modules:
                self._modules.add(id(value))
                if not is_installed(value):
                    self._namespace(f"{text}.{name}", value, scope)
            if is_plain(value) or isinstance(value, (FunctionType, type)):
                self.value(f"{text}.{name}", vars(holder), name, "dict", value, line, 1, True)

    def _of_class(self, text: str, holder: type, name: str, line: Read) -> None:
        """An attribute that is read of a class: its own, a base's, or a property of its class."""
        cls = next((c for c in holder.__mro__[:-1] if name in vars(c)), None)
        if cls is not None:
            value = vars(cls)[name]
            if (is_plain(value) or is_object(value)) and not hasattr(value, "__get__"):
                if cls is not holder:
                    own = ClassKey(holder, name)
                    self._keep(Place(f"{text} of its own", vars(holder), own, "dict", MISSING))
                key = ClassKey(cls, name)
                self.value(text, vars(cls), key, "dict", value, line, 1, True)
        elif any(name in vars(k) for k in inspect.getmro(type(holder)) if k not in (type, object)):
            self._computed(text, holder, name, line)

    def value(
        self,
        text: str,
        holder: Any,
        key: Any,
        how: str,
        value: Any,
        line: Read,
        depth: int,
        shared: bool,
    ) -> None:
        """A place, and the places inside its value."""
        copied = isinstance(value, nn.Parameter) and isinstance(value, FakeTensor)
        if id(value) in self._own or copied or depth > DEPTH:
            return
        if (mark := (id(holder), key)) in self._done:
            return
        self._done.add(mark)
        self._keep(Place(text, holder, key, how, value, line, shared))
        if type(value) in PROXIES:
            value = target_of(value)

        def inside(name: str, holder: Any, key: Any, how: str, value: Any) -> None:
            self.value(name, holder, key, how, value, line, depth + 1, shared)

        if isinstance(value, nn.Module):
            self._stranger(text, value, line)
        elif isinstance(value, MethodType):
            inside(f"{text}.__self__", value, "__self__", "fixed", value.__self__)
            self._function(text, value.__func__, line, depth, shared)
        elif isinstance(value, (dict, MappingProxyType)):
            for k, v in value.items():
                way = "dict" if isinstance(value, dict) else "proxy"
                inside(f"{text}[{k!r}]", value, k, way, v)
        elif isinstance(value, (UserDict, UserList, ChainMap)):
            name = "maps" if isinstance(value, ChainMap) else "data"
            inside(f"{text}.{name}", vars(value), name, "dict", vars(value)[name])
        elif isinstance(value, weakref.ref):
            inside(f"{text}()", value, "()", "fixed", target_of(value))
        elif isinstance(value, (list, tuple, deque)):
            way = "fixed" if isinstance(value, tuple) else "item"
            for i, v in enumerate(value):
                inside(f"{text}[{i}]", value, i, way, v)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                inside(f"{text}.{name}", value, name, "fixed", getattr(value, name))
        elif isinstance(value, tuple(kind for kind, _ in ANSWERS)):
            asked = next(getattr(value, name) for kind, name in ANSWERS if isinstance(value, kind))
            inside(f"{text}.{asked.__name__}()", asked, "()", "call", asked())
        elif isinstance(value, enum.Enum):
            self._attributes(text, vars(value), inside)
        elif isinstance(value, ContextVar):
            inside(f"{text}.get()", value, "get", "context", value.get(MISSING))
        elif isinstance(value, FunctionType):
            self._function(text, value, line, depth, shared)
            self._attributes(text, value.__dict__, inside)
        elif is_object(value):
            self._object(text, value, line, depth, shared)

    def _function(self, text: str, function: Any, line: Read, depth: int, shared: bool) -> None:
        """The closure and defaults of a function that something holds; where other code than its
        own ran, plain values of them only."""
        ran = id(getattr(function, "__code__", None)) in self._ran
        for name, holder, key, how, held in held_by_function(function):
            if is_plain(held) or (ran and not isinstance(held, (ModuleType, type))):
                read = (function.__code__, key) if ran else line
                self.value(f"{text}.{name}", holder, key, how, held, read, depth + 1, ran or shared)

    def _attributes(self, text: str, own: dict[str, Any], inside: Callable[..., None]) -> None:
        """Attributes of an object whose names the forward reads."""
        for name, held in own.items():
            if name in self._names and is_plain(held):
                inside(f"{text}.{name}", own, name, "dict", held)

    def _object(self, text: str, value: Any, line: Read, depth: int, shared: bool) -> None:
        names = self._reads.of(type(value))
        self._of_classes(type(value))
        exact = kind_of(type(value)) in self._reads.noted
        own = getattr(value, "__dict__", None)
        wanted: Iterable[str] = self._names
        if exact:
            wanted = {*names, *(self._reads.stored if shared else ())}
        if own is not None and ("__dict__" in names or isinstance(value, Distribution)):
            wanted = self._wanted(own, names) if exact else own
        for name in wanted:
            named, read = f"{text}.{name}", names.get(name, line)
            real = alias_of(type(value), name) or name
            known = exact or (own is not None and real in own) or has_default(type(value), real)
            known = known or name in self._reads.texts  # getattr(options, "scale", 1.0)
            if own is not None and known and not name.startswith("__"):
                self._attribute(named, value, own, real, read, depth + 1, shared)
            elif real in slots_of(type(value)) and hasattr(value, real):
                inner = getattr(value, real)
                self.value(named, value, real, "attribute", inner, read, depth + 1, shared)

    def _keep(self, place: Place) -> None:
        self.places.setdefault(place.name, place)
