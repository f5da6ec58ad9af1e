"""Ways in which a forward reads a value, other than by its name: a change is noticed."""

from __future__ import annotations

import enum
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import graphaccel
from tests.guards.test_guards import Net, guarded


class Rated(type):
    """A class of classes with a property."""

    held = 1.0

    @property
    def rate(cls) -> float:
        return cls.held


class Settings(metaclass=Rated):
    scale = 1.0


class Derived(Settings):
    pass


class Mode(enum.Enum):
    FAST = 1

    def __init__(self, _: int) -> None:
        self.gain = 1.0


USES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], object]]] = {
    "a path of attributes": (
        lambda s, h: h * operator.attrgetter("held.scale")(s),
        lambda s: setattr(s.held, "scale", 2.0),
    ),
    "a path that is split": (
        lambda s, h: h * functools.reduce(getattr, "held.scale".split("."), s),
        lambda s: setattr(s.held, "scale", 2.0),
    ),
    "an attribute without its getter": (
        lambda s, h: h * inspect.getattr_static(s, "alpha"),
        lambda s: setattr(s, "alpha", 2.0),
    ),
    "an attribute that comes later": (
        lambda s, h: h * s.__dict__.get("later", 1.0),
        lambda s: setattr(s, "later", 2.0),
    ),
    "a property of a class": (
        lambda _, h: h * Settings.rate,
        lambda _: setattr(Rated, "held", 2.0),
    ),
    "an attribute of a base": (
        lambda _, h: h * Derived.scale,
        lambda _: setattr(Settings, "scale", 2.0),
    ),
    "one that hides a base's": (
        lambda _, h: h * Derived.scale,
        lambda _: setattr(Derived, "scale", 2.0),
    ),
    "a value of a choice": (
        lambda s, h: h * s.mode.gain,
        lambda _: setattr(Mode.FAST, "gain", 2.0),
    ),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    Rated.held = Settings.scale = 1.0
    Mode.FAST.gain = 1.0
    if "scale" in vars(Derived):
        del Derived.scale


@pytest.mark.parametrize("name", USES)
def test_a_change_is_noticed(name: str) -> None:
    use, change = USES[name]
    model: Any = Net(use)
    model.held, model.mode = SimpleNamespace(scale=1.0), Mode.FAST
    guards = guarded(model)
    assert guards.hold()
    assert guards.hold()  # by identity
    change(model)
    assert not guards.hold()


TRAINER: dict[str, Any] = {}


def test_a_number_of_the_model_that_is_read_through_the_script() -> None:
    """The copy that is captured has a tensor in its place, and the script's model the number."""
    losses = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model: Any = Net(lambda _, h: h * TRAINER["model"].alpha).double()
        TRAINER["model"] = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimized:
            model, optimizer = graphaccel.optimize(model, optimizer, devices=1)
        for step in range(5):
            model.alpha = 1.0 + step
            loss = model(torch.ones(2, 4, dtype=torch.float64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-12)
