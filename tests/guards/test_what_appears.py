"""A forward looks up what is not there at capture: when it appears, or goes, this is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import graphaccel
from tests.guards.test_guards import Net, guarded

OPTIONS = SimpleNamespace()
NAME = "GUARDS_SCALE_THAT_APPEARS"


def _global(_: Any, h: Tensor) -> Tensor:
    try:
        return h * GUARDS_SCALE_THAT_APPEARS  # type: ignore[name-defined]
    except NameError:
        return h


USES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], object]]] = {
    "a number of a parameter": (
        lambda s, h: h * getattr(s.a.weight, "mult", 1.0),
        lambda s: setattr(s.a.weight, "mult", 2.0),
    ),
    "a private number": (
        lambda s, h: h * getattr(s.a.weight, "_mult", 1.0),
        lambda s: setattr(s.a.weight, "_mult", 2.0),
    ),
    "a flag of a parameter": (
        lambda s, h: 2 * h if hasattr(s.a.weight, "twice") else h,
        lambda s: setattr(s.a.weight, "twice", True),
    ),
    "a tensor of a parameter": (
        lambda s, h: h * getattr(s.a.weight, "mask", torch.ones(4, dtype=h.dtype)),
        lambda s: setattr(s.a.weight, "mask", torch.arange(4, dtype=torch.float64)),
    ),
    "a number that goes": (
        lambda s, h: h * getattr(s.b.weight, "gain", 1.0),
        lambda s: delattr(s.b.weight, "gain"),
    ),
    "an attribute of an object": (
        lambda _, h: h * getattr(OPTIONS, "scale", 1.0),
        lambda _: setattr(OPTIONS, "scale", 2.0),
    ),
    "a global": (_global, lambda _: globals().update({NAME: 2.0})),
    "a global by name": (
        lambda _, h: h * globals().get("GUARDS_SCALE_THAT_APPEARS", 1.0),
        lambda _: globals().update({NAME: 2.0}),
    ),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    globals().pop(NAME, None)
    vars(OPTIONS).clear()


def _model(use: Callable[[Any, Tensor], Any]) -> Any:
    torch.manual_seed(0)
    model: Any = Net(use).double()
    model.b.weight.gain = 3.0
    return model


@pytest.mark.parametrize("name", USES)
def test_it_is_noticed(name: str) -> None:
    use, change = USES[name]
    model = _model(use)
    guards = guarded(model)
    assert guards.hold()
    assert guards.hold()  # by identity
    change(model)
    assert not guards.hold()


def test_steps_read_what_is_there_now() -> None:
    results: list[list[float]] = []
    for optimized in (False, True):
        model = _model(lambda s, h: torch.stack([use(s, h) for use, _ in USES.values()]).mean(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimized:
            graphaccel.optimize(model, optimizer, devices=1)
        results.append([])
        for _, change in [(None, lambda _: None), *USES.values()]:
            change(model)
            loss = model(torch.ones(2, 4, dtype=torch.float64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results[-1].append(loss.item())
        globals().pop(NAME)
        vars(OPTIONS).clear()
    assert results[1] == pytest.approx(results[0], rel=1e-12)
