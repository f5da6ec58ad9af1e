"""What a gradient rule in Python reads, an autograd function's backward or a hook, is followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.guards.test_guards import guarded

SCALE = {"now": 1.0}


class Reversed(torch.autograd.Function):
    """Reverses a gradient, by a scale that its class holds."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -Reversed.scale * gradients[0]


class ReversedByGlobal(Reversed):
    """Reverses a gradient, by a scale in a global."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -SCALE["now"] * gradients[0]


class ReversedByModule(Reversed):
    """Reverses a gradient, by a scale of the module that it is called with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.module.scale * gradients[0], None


def _hooked(model: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * model.scale)
    return h


def _hooked_by_method(model: Any, h: Tensor) -> Tensor:
    h.register_hook(model.scaled)
    return h


def _in_both(model: Any, h: Tensor) -> Tensor:
    """In the loss it could be an input of the graph; the rule reads a number."""
    h = h * model.scale
    h.register_hook(lambda gradient: gradient * model.scale)
    return h


class Net(nn.Module):
    """`forward(x [B, 4])` → loss, through a rule."""

    def __init__(self, rule: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.rule = nn.Linear(4, 4), nn.Linear(4, 2), rule
        self.scale = 1.0

    def scaled(self, gradient: Tensor) -> Tensor:
        return gradient * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.rule(self, self.first(x)).tanh()).square().mean()


RULES: dict[str, Callable[..., Tensor]] = {
    "a class": lambda _, h: Reversed.apply(h),
    "a global": lambda _, h: ReversedByGlobal.apply(h),
    "a module": lambda model, h: ReversedByModule.apply(h, model),
    "a hook": _hooked,
    "a method": _hooked_by_method,
    "both": _in_both,
}


def _set(model: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model.scale = value
    monkeypatch.setitem(SCALE, "now", value)
    monkeypatch.setattr(Reversed, "scale", value)


@pytest.mark.parametrize("name", RULES)
def test_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(RULES[name])
    guards = guarded(model)
    assert guards.hold()
    _set(model, 2.0, monkeypatch)
    assert not guards.hold()


@pytest.mark.parametrize("name", ["a class", "both"])
def test_weights_are_those_of_eager_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model: Any = Net(RULES[name]).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimized:
            graphaccel.optimize(model, optimizer, devices=1)
        for step in range(4):
            _set(model, 1.0 + step, monkeypatch)
            optimizer.zero_grad()
            model(torch.randn(4, 4).double()).backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*results, rtol=0, atol=1e-12)
