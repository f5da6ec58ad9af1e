"""Another function of the same code, with other values in its closure or defaults, and another
member of a class: what they hold is noticed wherever the model finds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.guards.test_guards import Net, guarded


def _scaled(_: Any, h: Tensor, scale: float = 1.0) -> Tensor:
    return h * scale


def _by_keyword(_: Any, h: Tensor, *, scale: float = 1.0) -> Tensor:
    return h * scale


def _copied(function: FunctionType, scale: float) -> FunctionType:
    """A copy with another default, as decorators and templates make them."""
    code, names, name = function.__code__, function.__globals__, function.__name__
    copied = FunctionType(code, names, name, (scale,), function.__closure__)
    if function.__kwdefaults__:
        copied.__defaults__, copied.__kwdefaults__ = None, {"scale": scale}
    return copied


def _over_an_object(scale: float) -> Callable[..., Tensor]:
    options = SimpleNamespace(scale=scale)

    def use(_: Any, h: Tensor) -> Tensor:
        return h * options.scale

    return use


def _with_default(scale: float) -> Callable[..., Tensor]:
    def use(_: Any, h: Tensor, scale: float = scale) -> Tensor:
        return h * scale

    return use


def _method(scale: float) -> Callable[..., Tensor]:
    def use(_: Any, __: Any, h: Tensor, scale: float = scale) -> Tensor:
        return h * scale

    return use


def _twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Tensor:
        return 2 * function(*args)

    return wrapper


class Calls:
    """Calls what it holds."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Tensor:
        return self.function(*args)


MADE: dict[str, Callable[[float], Callable[..., Tensor]]] = {
    "a copy": lambda scale: _copied(_scaled, scale),
    "a copy by keyword": lambda scale: _copied(_by_keyword, scale),
    "a closure over an object": _over_an_object,
    "a default": _with_default,
    "below a decorator": lambda scale: _twice(_copied(_scaled, scale)),
    "an object below a decorator": lambda scale: _twice(_over_an_object(scale)),
    "a partial": lambda scale: functools.partial(_copied(_scaled, scale)),
    "a callable object": lambda scale: Calls(_with_default(scale)),
    "a bound method": lambda scale: MethodType(_method(scale), SimpleNamespace()),
}
REGISTRY: dict[str, Callable[..., Tensor]] = {}


def _of_the_model(_: Any, h: Tensor) -> Tensor:
    return REGISTRY["use"](None, h)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_another_function_of_one_code(name: str, registered: bool) -> None:
    REGISTRY["use"] = MADE[name](1.0)
    model = Net(_of_the_model if registered else REGISTRY["use"])
    guards = guarded(model)
    assert guards.hold()
    assert guards.hold()  # by identity
    if registered:
        REGISTRY["use"] = MADE[name](2.0)
    else:
        model.use = MADE[name](2.0)
    assert not guards.hold()


@pytest.mark.parametrize("function", [_scaled, _by_keyword])
def test_a_default_of_a_copy(function: FunctionType) -> None:
    model = Net(_copied(function, 1.0))
    guards = guarded(model)
    assert guards.hold()
    changed = _copied(function, 2.0)
    model.use.__defaults__, model.use.__kwdefaults__ = changed.__defaults__, changed.__kwdefaults__
    assert not guards.hold()


class Base(nn.Module):
    """Members that a script replaces."""

    @property
    def scale(self) -> float:
        return 1.0

    @staticmethod
    def static(h: Tensor) -> Tensor:
        return h

    @classmethod
    def of_class(cls, h: Tensor) -> Tensor:
        return h

    def __mul__(self, h: Tensor) -> Tensor:
        return h

    def forward(self, h: Tensor) -> Tensor:
        return self.of_class(self.static((self * h) * self.scale))


class Derived(Base):
    """Calls the forward of its base."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)


MEMBERS: dict[str, Any] = {
    "scale": property(lambda _: 2.0),
    "static": staticmethod(lambda h: 2 * h),
    "of_class": classmethod(lambda _, h: 2 * h),
    "__mul__": lambda _, h: 2 * h,
    "forward": lambda _, h: 2 * h,
}


@pytest.mark.parametrize("name", MEMBERS)
def test_another_member_of_a_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(lambda s, h: s.derived(h))
    model.derived = Derived()
    guards = guarded(model)
    assert guards.hold()
    monkeypatch.setattr(Base, name, MEMBERS[name])
    assert not guards.hold()


def _steps(model: Any, optimizer: Any) -> Iterator[float]:
    for step in range(3):
        model.use = _over_an_object(1.0 + step)
        loss = model(torch.ones(2, 4, dtype=torch.float64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def test_steps_use_the_function_that_is_there_now() -> None:
    results = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model: Any = Net(_over_an_object(1.0)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimized:
            model, optimizer = graphaccel.optimize(model, optimizer, devices=1)
        results.append([*_steps(model, optimizer)])
    assert results[1] == pytest.approx(results[0], rel=1e-12)


OPTIONS = SimpleNamespace(scale=1.0)


def test_what_the_model_and_the_script_hold_has_both_names() -> None:
    """The captured copy has options of its own, the script's model those of the script."""
    model: Any = Net(lambda s, h: h * s.config.scale * OPTIONS.scale)
    model.config = OPTIONS
    graphaccel.optimize(model, devices=1)
    OPTIONS.scale = 1.0
    first = model(torch.ones(2, 4)).item()
    OPTIONS.scale = 2.0
    assert model(torch.ones(2, 4)).item() != first
