"""State of the process and of foreign objects that a forward reads: a change of each is noticed."""

from __future__ import annotations

import array
import ctypes
import gc
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from gc import isenabled
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import graphaccel
from tests.guards.test_guards import Net, guarded


def _twice(h: Tensor) -> Tensor:
    return 2 * h


COUNT = ctypes.c_double(1.0)
SHARED = multiprocessing.Value("d", 1.0)
NUMBERS = array.array("d", [1.0])


class Table:
    """A property of an object that no module holds."""

    values: ClassVar[dict[str, float]] = {}

    @property
    def scale(self) -> float:
        return self.values["scale"]


class Kept:
    """A descriptor that stores its values by name."""

    def __init__(self) -> None:
        self.held = 1.0

    def __get__(self, holder: Any, owner: type) -> float:
        return self.held

    def __set__(self, holder: Any, value: float) -> None:
        self.held = value


class Described(Net):
    rate = Kept()


TABLE = Table()
USES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], object]]] = {
    "a value of C": (lambda _, h: h * COUNT.value, lambda _: setattr(COUNT, "value", 2.0)),
    "a value of several processes": (
        lambda _, h: h * SHARED.value,
        lambda _: setattr(SHARED, "value", 2.0),
    ),
    "an array": (lambda _, h: h * NUMBERS[0], lambda _: NUMBERS.__setitem__(0, 2.0)),
    "a property": (lambda _, h: h * TABLE.scale, lambda _: Table.values.update(scale=2.0)),
    "a descriptor": (lambda s, h: h * s.rate, lambda s: setattr(s, "rate", 2.0)),
    "an attribute past what is recorded": (
        lambda s, h: h * object.__getattribute__(s, "alpha"),
        lambda s: setattr(s, "alpha", 2.0),
    ),
    "a value on a module": (
        lambda _, h: h * math.my_scale,  # type: ignore[attr-defined]
        lambda _: setattr(math, "my_scale", 2.0),
    ),
    "a value on a parameter": (
        lambda s, h: h * s.a.weight.scale,
        lambda s: setattr(s.a.weight, "scale", 2.0),
    ),
    "the environment": (
        lambda _, h: h * float(os.environ["GUARDS_SCALE"]),
        lambda _: os.environ.update(GUARDS_SCALE="2"),
    ),
    "a variable that is not there": (
        lambda _, h: h * float(os.getenv("GUARDS_SHIFT", "1")),
        lambda _: os.environ.update(GUARDS_SHIFT="2"),
    ),
    "a flag": (
        lambda _, h: 2 * h if torch.are_deterministic_algorithms_enabled() else h,
        lambda _: torch.use_deterministic_algorithms(True),
    ),
    "a flag of a backend": (
        lambda _, h: 2 * h if torch.backends.cudnn.benchmark else h,
        lambda _: torch.backends.cudnn.set_flags(_benchmark=True),
    ),
    "a function of torch's": (
        lambda _, h: functional.gelu(h),
        lambda _: setattr(functional, "gelu", _twice),
    ),
    "a function of torch's by name": (
        lambda s, h: getattr(functional, s.activation)(h),
        lambda _: setattr(functional, "relu", _twice),
    ),
    "a number of torch's": (
        lambda _, h: h * torch.get_num_threads(),
        lambda _: torch.set_num_threads(torch.get_num_threads() + 1),
    ),
    "a number of Python's": (
        lambda _, h: h * sys.getrecursionlimit(),
        lambda _: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    ),
    "a flag of Python's by its own name": (
        lambda _, h: 2 * h if isenabled() else h,
        lambda _: gc.disable() if isenabled() else gc.enable(),
    ),
    "the working directory": (
        lambda _, h: h * len(os.getcwd()),
        lambda _: os.chdir(os.sep),
    ),
    "whether gradients are on": (
        lambda _, h: 2 * h if torch.is_grad_enabled() else h,
        lambda _: torch.set_grad_enabled(False),
    ),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("GUARDS_SCALE", "GUARDS_SHIFT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("GUARDS_SHIFT")
    monkeypatch.setattr(math, "my_scale", 1.0, raising=False)
    # Not by its attribute: torch's own test suite, once imported, lets nothing assign to that.
    torch.backends.cudnn.set_flags(_benchmark=False)
    for name in ("gelu", "relu"):
        monkeypatch.setattr(functional, name, getattr(functional, name))
    Table.values["scale"], threads = 1.0, torch.get_num_threads()
    limit, folder, collects = sys.getrecursionlimit(), os.getcwd(), isenabled()
    yield
    sys.setrecursionlimit(limit)
    os.chdir(folder)
    if collects:
        gc.enable()
    else:
        gc.disable()
    torch.backends.cudnn.set_flags(_benchmark=False)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("name", USES)
def test_a_change_is_noticed(name: str) -> None:
    use, change = USES[name]
    model = Described(use)
    model.a.weight.scale = 1.0  # type: ignore[attr-defined]
    model.activation = "relu"  # type: ignore[assignment]
    guards = guarded(model)
    assert guards.hold()
    assert guards.hold()  # by identity
    change(model)
    assert not guards.hold()


def _of_module(_: Any, h: Tensor) -> Tensor:
    import guards_helpers  # type: ignore[import-not-found]

    return guards_helpers.inner.act(h) * guards_helpers.inner.SCALE


@pytest.mark.parametrize(("name", "now"), [("SCALE", 2.0), ("act", _twice)])
def test_a_module_of_a_module(name: str, now: object, monkeypatch: pytest.MonkeyPatch) -> None:
    helpers, inner = ModuleType("guards_helpers"), ModuleType("guards_helpers.inner")
    helpers.__file__ = inner.__file__ = __file__
    helpers.inner = inner  # type: ignore[attr-defined]
    inner.SCALE, inner.act = 1.0, lambda h: h  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guards_helpers", helpers)
    guards = guarded(Net(_of_module))
    assert guards.hold()
    setattr(inner, name, now)
    assert not guards.hold()


def test_a_value_on_a_parameter_is_an_input_of_the_graph() -> None:
    losses = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model: Any = Net(lambda s, h: h * s.a.weight.scale).double()
        model.a.weight.scale = 1.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimized:
            model, optimizer = graphaccel.optimize(model, optimizer, devices=1)
        for step in range(5):
            model.a.weight.scale = 1.0 + step
            loss = model(torch.ones(2, 4, dtype=torch.float64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-12)
    assert len(model.graphaccel.compiler.captures.steps) == 2
