"""What functions hold is guarded, whether they are found by name or by the garbage collector."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.guards.test_guards import Net, guarded


class Held:
    """What a function holds."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


HELD = [Held(), Held()]
IN_A_LOOP = []
for each in HELD:

    def _of_the_loop(_: Any, h: Tensor, held: Held = each) -> Tensor:
        return h * held.scale

    IN_A_LOOP.append(_of_the_loop)


@pytest.mark.parametrize("changed", [0, 1])
def test_functions_of_one_name(changed: int) -> None:
    model = Net(lambda s, h: IN_A_LOOP[1](s, IN_A_LOOP[0](s, h)))
    guards = guarded(model)
    assert guards.hold()
    HELD[changed].scale += 1.0
    assert not guards.hold()


KEYWORD = Held()


def _by_keyword(*, h: Tensor, held: Held = KEYWORD) -> Tensor:
    return h * held.scale


def test_a_default_of_a_keyword() -> None:
    guards = guarded(Net(lambda _, h: _by_keyword(h=h)))
    assert guards.hold()
    KEYWORD.scale = 2.0
    assert not guards.hold()


def _layer(held: Held) -> nn.Module:
    class Layer(nn.Module):
        def forward(self, h: Tensor, held: Held = held) -> Tensor:
            return h * held.scale

    return Layer()


@pytest.mark.parametrize("changed", [0, 1])
def test_classes_of_one_definition(changed: int) -> None:
    held = [Held(), Held()]
    model = Net(lambda s, h: s.second(s.first(h)))
    model.first, model.second = map(_layer, held)
    guards = guarded(model)
    assert guards.hold()
    held[changed].scale = 2.0
    assert not guards.hold()


def _twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Tensor:
        return function(*args) * 2

    return wrapper


class Plain(nn.Module):
    """A model as a script has it: nothing that it runs holds more than constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @staticmethod
    def halved(h: Tensor, by: float = 2.0) -> Tensor:
        return h / by

    @property
    def scale(self) -> float:
        return 3.0

    @torch.no_grad()
    def moved(self, h: Tensor) -> Tensor:
        return h + 1

    def forward(self, h: Tensor, more: Tensor | None = None) -> Tensor:
        parts = [self.layer(h) * i for i in range(2)]
        return (sum(parts) * self.scale + self.moved(self.halved(h))).sum()


def test_a_module_of_a_script_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gc, "get_referrers", lambda *codes: asked.append(codes) or [])
    guards = guarded(Plain())
    assert guards.hold()
    assert asked == []
    monkeypatch.setattr(Plain.forward, "__defaults__", (torch.ones(1),))
    assert not guards.hold()


class Wrapped(Plain):
    """With a decorator of its own, whose function is another for each that it decorates."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.held = held

    @_twice
    def forward(self, h: Tensor) -> Tensor:
        return (self.layer(h) * self.held.scale).sum()


def test_a_method_below_a_decorator() -> None:
    held = Held()
    guards = guarded(Wrapped(held))
    assert guards.hold()
    held.scale = 2.0
    assert not guards.hold()


def test_a_function_that_nothing_holds_any_more_has_no_place() -> None:
    """Whether it is still there depends on the collector, which runs on each rank for itself."""
    gc.disable()
    try:
        for _ in range(3):
            _layer(Held())
        model: Any = Net(lambda s, h: s.first(h))
        model.first = _layer(Held())
        names = guarded(model).recorded
    finally:
        gc.enable()
    assert any("_layer" in name for name in names)
    assert not any("#" in name for name in names)
