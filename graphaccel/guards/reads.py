"""Records the Python values that a forward reads: attributes, globals, closures, defaults.

Inside of `recorded`, `nn.Module` and the classes of plain objects that the model holds (a
configuration) record every attribute that is read, so a name computed at run time (`getattr(self,
name)`) counts too. A profile function records which functions run; their globals, closures and
defaults are read from their code.
"""

from __future__ import annotations

import builtins
import dis
import os
import random
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from graphaccel.errors.messages import Location
from graphaccel.guards.functions import Called, called_in, functions_of
from graphaccel.guards.system import OPENS, Question, asked_of_system

_OWN = (f"{torch.__path__[0]}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<frozen")
"""Where the source code of torch and graphaccel is."""
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"

_PAST = frozenset({"__getattribute__", "getattr_static"})
"""Ways to read an attribute that are not recorded."""

_SEEDS = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state"})
"""Methods of `torch.Generator` that set its state."""

_READS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})

Kind = tuple[str, str]
"""A class by module and qualified name, which an optimized model's subclass shares."""


def kind_of(cls: type) -> Kind:
    """The name under which reads of a class's instances are recorded."""
    return cls.__module__, cls.__qualname__


def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package, torch or Python itself."""
    return _installed(file) or is_inside(file)


def is_inside(file: str) -> bool:
    """Whether a file is torch's, graphaccel's or the standard library's."""
    return file.startswith(_OWN) or (file.startswith(_STANDARD) and not _installed(file))


def _installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


@dataclass(frozen=True)
class Scope:
    """A function that ran, with the scope of its names: its globals, and the functions whose
    closures and defaults it reads."""

    code: CodeType = field(repr=False)
    names: dict[str, Any] = field(repr=False)
    functions: tuple[FunctionType, ...] = field(repr=False, default=())

    @property
    def library(self) -> bool:
        """Whether it belongs to an installed package."""
        return is_library(self.code.co_filename)

    @cached_property
    def absent(self) -> frozenset[str]:
        """The global names that its code reads, where nothing has them."""
        if self.library:
            return frozenset()
        read = {i.argval for i in dis.get_instructions(self.code) if i.opname in _READS_GLOBAL}
        return frozenset(read - self.names.keys() - vars(builtins).keys())


@dataclass
class Reads:
    """What a forward read.

    attributes: class → attribute → the first line that reads it. written: the same for attributes
    of modules that it wrote. missing: attributes that it looked up on tensors that have none.
    scopes: functions that ran. draws: lines that draw from a generator of Python's `random`. seeds:
    lines that set the state of a torch generator. questions: to files and to the system. effects:
    what it prints, logs and writes to files. noted: classes whose reads are all in `attributes`.
    roots: what is called besides the model, by name. copies: of the model, which the functions that
    ran may hold. rules: functions that ran to compute gradients.
    """

    attributes: dict[Kind, dict[str, Location | None]] = field(default_factory=dict)
    written: dict[Kind, dict[str, Location | None]] = field(default_factory=dict)
    missing: dict[str, Location | None] = field(default_factory=dict)
    scopes: tuple[Scope, ...] = ()
    draws: list[Location] = field(default_factory=list)
    seeds: list[Location] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    effects: list[Question] = field(default_factory=list)
    noted: set[Kind] = field(default_factory=set)
    roots: dict[str, Any] = field(default_factory=dict, repr=False)
    copies: list[nn.Module] = field(default_factory=list, repr=False)
    rules: list[CodeType] = field(default_factory=list, repr=False)
    _differentiating: bool = False

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """In this context what runs computes gradients."""
        self._differentiating = True
        try:
            yield
        finally:
            self._differentiating = False

    def note(self, question: Question) -> None:
        """Note what the user's code does outside of the process."""
        (self.questions if question.what == OPENS else self.effects).append(question)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name in the code of the user's functions, also in texts such as "config.scale"."""
        own = (s.code.co_names for s in self.scopes if not s.library)
        return self.texts.union(*own)

    @cached_property
    def texts(self) -> frozenset[str]:
        """The names in the texts of the user's functions."""
        return frozenset().union(*(_named_in(s.code) for s in self.scopes if not s.library))

    @cached_property
    def read_by_rules(self) -> frozenset[str]:
        """Names that functions may read which compute gradients."""
        codes = self.rules
        return frozenset().union(*({*c.co_names, *c.co_freevars, *_named_in(c)} for c in codes))

    @cached_property
    def stored(self) -> frozenset[str]:
        """Names of attributes that the user's functions may set."""
        own = [s.code for s in self.scopes if not s.library]
        read = (i for code in own for i in dis.get_instructions(code))
        return frozenset(i.argval for i in read if i.opname == "STORE_ATTR")

    @cached_property
    def looked_up(self) -> frozenset[str]:
        """Names that the user's functions may read past what is recorded, by
        `object.__getattribute__` or `inspect.getattr_static`."""
        codes = [s.code for s in self.scopes if not s.library]
        past = [c for c in codes if _PAST & {*c.co_names}]
        return frozenset().union(*map(_named_in, past))

    def of(self, cls: type) -> Mapping[str, Location | None]:
        """The attributes that were read of a class's instances."""
        return self.attributes.get(kind_of(cls), {})


def _named_in(code: CodeType) -> set[str]:
    """The names in the strings of a function's code: `"scale"`, `"config.scale"`."""
    texts = [c for c in code.co_consts if isinstance(c, str)]
    parts = [text.split(".") for text in texts]
    return {name for names in parts if all(map(str.isidentifier, names)) for name in names}


def line_of(frame: FrameType | None) -> Location | None:
    """The user's line from which a frame of torch or Python was called; a library's line if there
    is none."""
    result = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_inside(file):
            result = result or frame
            if not _installed(file):
                result = frame
                break
        frame = frame.f_back
    return None if result is None else Location(result.f_code.co_filename, result.f_lineno)


@contextmanager
def recorded(classes: set[type]) -> Iterator[Reads]:
    """Record what code in this context reads; complete when it ends.

    classes: of the plain objects whose attributes are recorded, besides modules.
    """
    reads = Reads()
    codes: dict[int, Called] = {}
    before = sys.getprofile()
    with ExitStack() as stack:
        for cls in (nn.Module, *classes):
            stack.enter_context(_noted(cls, reads))
        stack.enter_context(_writes_noted(reads))
        stack.enter_context(_missing_noted(reads))
        sys.setprofile(_profile(codes, reads))
        try:
            yield reads
        finally:
            _restore_profile(before)
    reads.scopes = _scopes(codes)


@contextmanager
def paused() -> Iterator[None]:
    """Pause the recording of functions that run, for code of torch below an op: on tensors without
    data it is thousands of calls, each of which the hook would slow down."""
    hook = sys.getprofile()
    if getattr(hook, "__module__", None) != __name__:  # another profiler's, or none
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(hook)


def _restore_profile(before: Any) -> None:
    """Restore the interpreter's profile hook: a function, or a profiler written in C."""
    if before is None or callable(before):
        sys.setprofile(before)
    else:  # cProfile's before Python 3.12, which installs its own hook
        sys.setprofile(None)
        before.enable()


def _profile(codes: dict[int, Called], reads: Reads) -> Any:
    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in codes:
                codes[id(frame.f_code)] = called_in(frame)
            if reads._differentiating and not is_library(frame.f_code.co_filename):
                reads.rules.append(frame.f_code)
        elif event == "c_call":
            holder = getattr(argument, "__self__", None)
            if isinstance(holder, random.Random):
                line = line_of(frame)
                if line is not None:
                    reads.draws.append(line)
            elif isinstance(holder, torch.Generator):
                line = line_of(frame)
                if line is not None and argument.__name__ in _SEEDS:
                    reads.seeds.append(line)
            elif isinstance(holder, ModuleType):
                asked = asked_of_system(frame, holder.__name__, argument)
                if asked is not None and not is_library(asked[0].f_code.co_filename):
                    line = line_of(asked[0]) or Location(frame.f_code.co_filename, 0)
                    reads.questions.append(Question(asked[1], line))

    return profile


@contextmanager
def _noted(cls: type, reads: Reads) -> Iterator[None]:
    """In this context instances of a class record which of their attributes are read."""
    own = cls.__dict__.get("__getattribute__")
    read: Any = cls.__getattribute__

    def reading(self: Any, name: str) -> Any:
        kind = kind_of(type(self))
        known = reads.attributes.setdefault(kind, {})
        if name not in known:
            frame = sys._getframe(1)
            if name != "__dict__" or not is_inside(frame.f_code.co_filename):
                known[name] = line_of(frame)
        return read(self, name)

    try:
        cls.__getattribute__ = reading  # type: ignore[method-assign, assignment]
    except TypeError:  # a class defined in C: its instances are compared by identity
        yield
        return
    reads.noted.add(kind_of(cls))
    try:
        yield
    finally:
        if own is None:
            del cls.__getattribute__
        else:
            cls.__getattribute__ = own  # type: ignore[method-assign]


@contextmanager
def _missing_noted(reads: Reads) -> Iterator[None]:
    """In this context attributes are noted that a tensor is asked for and does not have."""

    def missing(self: torch.Tensor, name: str) -> Any:
        frame = sys._getframe(1)
        if name not in reads.missing and not is_inside(frame.f_code.co_filename):
            reads.missing[name] = line_of(frame)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    torch.Tensor.__getattr__ = missing  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.Tensor.__getattr__  # type: ignore[attr-defined]


@contextmanager
def _writes_noted(reads: Reads) -> Iterator[None]:
    write = nn.Module.__setattr__

    def writing(self: nn.Module, name: str, value: Any) -> None:
        known = reads.written.setdefault(kind_of(type(self)), {})
        if name not in known:
            known[name] = line_of(sys._getframe(1))
        write(self, name, value)

    nn.Module.__setattr__ = writing  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = write  # type: ignore[method-assign]


def _scopes(codes: dict[int, Called]) -> tuple[Scope, ...]:
    """The functions that ran; of installed packages, closures and defaults belong to decorators and
    do not change."""
    own = [one for one in codes.values() if not is_inside(_file(one.code, one.names))]
    functions = functions_of([one for one in own if not is_library(_file(one.code, one.names))])
    return tuple(Scope(one.code, one.names, tuple(functions.get(id(one.code), ()))) for one in own)


def _file(code: CodeType, names: dict[str, Any]) -> str:
    """The file of a function; for one created from text, that of its module."""
    if not code.co_filename.startswith("<string") or names.get("__name__") == "__main__":
        return code.co_filename
    return str(names.get("__file__", "<frozen"))
