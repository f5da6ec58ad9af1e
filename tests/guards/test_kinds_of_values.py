"""Values of every kind that a forward may read: a change of each is noticed."""

from __future__ import annotations

import copy
import datetime
import gc
import sys
import threading
import weakref
from collections import ChainMap, UserDict
from collections.abc import Callable
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from tests.guards.test_guards import Net, guarded

CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()

VALUES = {
    "a NumPy scalar": (np.float32(1), np.float32(2)),
    "a NumPy integer": (np.int64(1), np.int64(2)),
    "a decimal": (Decimal(1), Decimal(2)),
    "a fraction": (Fraction(1, 2), Fraction(1, 3)),
    "a duration": (datetime.timedelta(1), datetime.timedelta(2)),
    "a path": (Path("a"), Path("b")),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_replaced(name: str) -> None:
    before, after = VALUES[name]
    model = Net(lambda s, h: h if s.value == before else -h)
    model.value = before
    guards = guarded(model)
    assert guards.hold()
    model.value = copy.deepcopy(before)
    assert guards.hold()
    model.value = after
    assert not guards.hold()


class Settings:
    """Settings that the forward reads through something else."""

    held: Settings | None = None
    scale = 1.0

    @classmethod
    def get(cls) -> Settings:
        assert cls.held is not None
        return cls.held


SETTINGS = {"scale": 1.0}
SHOWN = MappingProxyType(SETTINGS)
CHAINED = ChainMap({}, SETTINGS)
OWN = UserDict(scale=1.0)
HELD = Settings()
PRIOR = [Normal(torch.zeros(4), torch.ones(4), validate_args=False)]
READS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[], object]]] = {
    "a mapping proxy": (
        lambda _, h: h * SHOWN["scale"],
        lambda: SETTINGS.update(scale=SETTINGS["scale"] + 1),
    ),
    "a chain of dicts": (
        lambda _, h: h * CHAINED["scale"],
        lambda: SETTINGS.update(scale=SETTINGS["scale"] + 1),
    ),
    "a dict in an object": (lambda _, h: h * OWN["scale"], lambda: OWN.update(scale=2.0)),
    "a weak reference": (lambda s, h: h * s.weak().scale, lambda: setattr(HELD, "scale", 2.0)),
    "an object of a class": (
        lambda _, h: h * Settings.get().scale,
        lambda: setattr(HELD, "scale", 3.0),
    ),
    "a distribution": (
        lambda _, h: h * PRIOR[0].log_prob(h),
        lambda: PRIOR.__setitem__(0, Normal(torch.ones(4), torch.ones(4), validate_args=False)),
    ),
    "a distribution in place": (
        lambda _, h: h * PRIOR[0].log_prob(h),
        lambda: PRIOR[0].loc.fill_(3.0),
    ),
    "an attribute of the class": (
        lambda s, h: h * type(s).rate,
        lambda: setattr(Rated, "rate", 2.0),
    ),
}


class Rated(Net):
    rate = 1.0


@pytest.mark.parametrize("name", READS)
def test_a_value_behind_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "held", HELD)
    use, change = READS[name]
    model = Rated(use)
    model.weak = weakref.ref(HELD)
    guards = guarded(model)
    assert guards.hold()
    assert guards.hold()
    change()
    assert not guards.hold()


IN_PLACE: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "a set": ({1}, lambda held: held.add(2)),
    "bytes": (bytearray(b"a"), lambda held: held.append(1)),
    "a NumPy array": (np.ones(2), lambda held: held.fill(2)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_value_that_is_written_in_place(name: str) -> None:
    value, change = IN_PLACE[name]
    model = Net(lambda s, h: h * len(s.value))
    model.value = value
    guards = guarded(model)
    assert guards.hold()
    assert guards.hold()  # by identity
    change(value)
    assert not guards.hold()


def _of_context(_: Any, h: Tensor) -> Tensor:
    return h * CONTEXT.get()


def _of_thread(_: Any, h: Tensor) -> Tensor:
    return h * LOCAL.scale


def test_a_context_variable() -> None:
    guards = guarded(Net(_of_context))
    assert guards.hold()
    assert guards.hold()
    token = CONTEXT.set(2.0)
    assert not guards.hold()
    CONTEXT.reset(token)
    assert guards.hold()


def test_a_value_of_this_thread() -> None:
    LOCAL.scale = 1.0
    guards = guarded(Net(_of_thread))
    assert guards.hold()
    LOCAL.scale = 2.0
    assert not guards.hold()


def test_a_rate_of_the_optimizer_that_the_model_holds() -> None:
    model = Net(lambda s, h: h * s.held[0].param_groups[0]["lr"])
    model.held = [torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)]
    guards = guarded(model)
    assert guards.hold()
    model.held[0].param_groups[0]["lr"] = 0.2
    assert not guards.hold()


def _scaled(factor: dict[str, float]) -> Callable[[Any, Tensor], Tensor]:
    return lambda _, h: h * factor["scale"]


def test_a_closure_that_the_garbage_collector_does_not_look_at() -> None:
    factor = {"scale": 1.0}
    model = Net(_scaled(factor))
    gc.freeze()
    try:
        guards = guarded(model)
        assert not gc.get_freeze_count(), "what is created from here on is no garbage for ever"
    finally:
        gc.unfreeze()
    assert guards.hold()
    factor["scale"] = 2.0
    assert not guards.hold()


def _of_function(_: Any, h: Tensor) -> Tensor:
    return h * _of_function.scale  # type: ignore[attr-defined]


def _of_import(_: Any, h: Tensor) -> Tensor:
    import forward_settings  # type: ignore[import-not-found]

    return h * forward_settings.SCALE


def test_an_attribute_of_a_function() -> None:
    _of_function.scale = 1.0  # type: ignore[attr-defined]
    guards = guarded(Net(_of_function))
    assert guards.hold()
    _of_function.scale = 2.0  # type: ignore[attr-defined]
    assert not guards.hold()


def test_a_module_that_the_forward_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModuleType("forward_settings")
    settings.__file__ = __file__
    settings.SCALE = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forward_settings", settings)
    guards = guarded(Net(_of_import))
    assert guards.hold()
    settings.SCALE = 2.0  # type: ignore[attr-defined]
    assert not guards.hold()
