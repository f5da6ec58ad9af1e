"""Loss functions that hold something: a criterion with weights, a teacher that follows the model, a
number on a schedule. What they hold changes between steps, and each step reads what it is then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

Change = Callable[[int, nn.Module], None]
CRITERION = nn.CrossEntropyLoss()


def _teacher() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double().requires_grad_(False)


def _follow(teacher: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.3)


class Distil:
    """A teacher and a weight, in a plain object."""

    def __init__(self) -> None:
        self.teacher, self.weight = _teacher(), 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * F.mse_loss(output, self.teacher(target))

    def change(self, step: int, model: nn.Module) -> None:
        self.weight = 1.0 / (1 + step)
        _follow(self.teacher, model)


def criterion() -> tuple[Any, Change]:
    """Class weights that are replaced, then written in place."""
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0).double())

    def change(step: int, _: nn.Module) -> None:
        if step == 1:
            loss.weight = torch.ones(5).double()
        elif step == 2:
            loss.weight[0] = 4.0

    return loss, change


def smoothing() -> tuple[Any, Change]:
    """A number of a criterion that a function reads as a global."""

    def change(step: int, _: nn.Module) -> None:
        CRITERION.label_smoothing = 0.1 * step

    return lambda output, target: CRITERION(output, target), change


def closure() -> tuple[Any, Change]:
    """A teacher that a function closes over."""
    teacher = _teacher()
    return lambda output, target: F.mse_loss(output, teacher(target)), functools.partial(
        _follow_step, teacher
    )


def _follow_step(teacher: nn.Module, _: int, model: nn.Module) -> None:
    _follow(teacher, model)


def called_object() -> tuple[Any, Change]:
    loss = Distil()
    return loss, loss.change


def method() -> tuple[Any, Change]:
    loss = Distil()
    return loss.__call__, loss.change


def partial() -> tuple[Any, Change]:
    weight = torch.arange(1.0, 6.0).double()

    def change(step: int, _: nn.Module) -> None:
        weight[0] = 3.0 * step

    return functools.partial(F.cross_entropy, weight=weight), change


MAKERS = {f.__name__: f for f in (criterion, smoothing, closure, called_object, method, partial)}


def _train(name: str, pins: dict[str, Any] | None) -> Iterator[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    loss_fn, change = MAKERS[name]()
    classes = name in ("criterion", "smoothing", "partial")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if pins is not None:
        model, optimizer = graphaccel.optimize(model, optimizer, loss_fn=loss_fn, **pins)
    for step in range(4):
        change(step, model)
        x = torch.randn(4, 3).double()
        target = torch.randint(0, 5, (4,)) if classes else x
        loss = loss_fn(model(x), target) if pins is None else model(x, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    yield from graphaccel.full_state_dict(model).values()


def _furthest(name: str, pins: dict[str, Any]) -> float:
    results = [[v.detach().clone() for v in _train(name, chosen)] for chosen in (None, pins)]
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_one_process(name: str) -> None:
    assert _furthest(name, {"devices": 1}) < 1e-12


@pytest.mark.parametrize("name", MAKERS)
def test_two_processes(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _furthest, name, {"data": 2})) < 1e-12


class Hidden(nn.Module):
    """A frozen layer in a list, where `parameters()` does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(3, 3), [nn.Linear(3, 3).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), self.hidden[0](x))


def test_a_frozen_layer_in_a_list_is_read_as_it_is() -> None:
    losses = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Hidden().double()
        hidden = model.hidden[0].double()
        if ours:
            model = graphaccel.optimize(model, devices=1)
        found = []
        for step in range(3):
            hidden.weight.fill_(step)
            found.append(model(torch.ones(2, 3).double()).item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
