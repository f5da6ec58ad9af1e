"""Ways in which a forward reads a value, other than by its name: a change is noticed."""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from queue import Queue
from threading import Event
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
    pause = timedelta(seconds=1)


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
    "a global that is looked up": (
        lambda _, h: h * globals()["SCALE"],
        lambda _: globals().update(SCALE=2.0),
    ),
    "a name among the builtins": (
        lambda _, h: h * my_scale,  # type: ignore[name-defined]  # noqa: F821
        lambda _: setattr(builtins, "my_scale", 2.0),
    ),
    "a duration of a class": (
        lambda _, h: h * Settings.pause.total_seconds(),
        lambda _: setattr(Settings, "pause", timedelta(seconds=2)),
    ),
    "an event": (lambda s, h: 2 * h if s.event.is_set() else h, lambda s: s.event.set()),
    "the length of a queue": (lambda s, h: h * s.queue.qsize(), lambda s: s.queue.put(2)),
    "a value of a choice": (
        lambda s, h: h * s.mode.gain,
        lambda _: setattr(Mode.FAST, "gain", 2.0),
    ),
}


SCALE = 1.0


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(builtins, "my_scale", 1.0, raising=False)
    yield
    Rated.held = Settings.scale = 1.0
    Settings.pause = timedelta(seconds=1)
    globals()["SCALE"] = 1.0
    Mode.FAST.gain = 1.0
    if "scale" in vars(Derived):
        del Derived.scale


@pytest.mark.parametrize("name", USES)
def test_a_change_is_noticed(name: str) -> None:
    use, change = USES[name]
    model: Any = Net(use)
    model.held, model.mode = SimpleNamespace(scale=1.0), Mode.FAST
    model.event, model.queue = Event(), Queue()
    model.queue.put(1)
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


def _opened(path: Path) -> str:
    with open(path) as file:
        return file.read()


@pytest.mark.parametrize("way", [_opened, Path.read_text])
def test_a_file_that_the_forward_opens(way: Callable[[Path], str], tmp_path: Path) -> None:
    path = tmp_path / "scale"
    path.write_text("1.0")
    with pytest.raises(graphaccel.errors.StateFrozen) as raised:
        guarded(Net(lambda _, h: h * float(way(path))))
    text = str(raised.value)
    assert "`Net.forward` opens a file" in text
    assert "test_ways_to_read.py" in text


def test_a_warning_opens_no_file_of_the_forward() -> None:
    def use(_: Any, h: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("odd", stacklevel=1)
        return h + len(inspect.getsource(Settings))

    assert guarded(Net(use)).hold()
