"""Models that take a gradient in their forward, or return what is not seen: class and full text."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH
from tests.support.untouched import refused

DIRECTION = "first derivatives in a direction can be captured:  value, slope = torch.func.jvp(function, (x,), (direction,))"
LOST = "a gradient that is taken in the forward reads values that torch.export loses"
TRANSFORM = "torch.export can not trace this transform of torch.func"


class Field(nn.Module):
    """A function of [B, 8], whose derivative is to be y: [B, 8]; `forward(x, y)` → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def value(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).tanh())

    def total(self, x: Tensor) -> Tensor:
        return self.value(x).sum()


class Transformed(Field):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.grad(self.total)(x), y)


class PerExample(Field):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.vmap(torch.func.grad(self.total))(x), y)


class Penalty(Field):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = (0.5 * x + 0.5 * y).requires_grad_()
        (slope,) = torch.autograd.grad(self.total(mixed), mixed, create_graph=True)
        return self.total(x) + (slope.norm(dim=1) - 1).pow(2).mean()


class OfActivation(Field):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layer(x)
        (slope,) = torch.autograd.grad(self.out(hidden).tanh().sum(), hidden, create_graph=True)
        return F.mse_loss(slope, y)


class OfWeight(Field):
    """What export keeps: the gradient of a linear layer reads inputs of ops only."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.layer(x)
        (slope,) = torch.autograd.grad(made.pow(2).sum(), self.layer.weight, create_graph=True)
        return F.mse_loss(self.out(made), y) + slope.pow(2).mean()


class Directional(Field):
    """What the help line says."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        function, direction = self.value, torch.ones_like(x)
        value, slope = torch.func.jvp(function, (x,), (direction,))
        return F.mse_loss(slope, y) + value.pow(2).mean()


class InForward(Field):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.value(x), y)
        loss.backward()
        return loss


def _refused(kind: type[nn.Module], error: type[errors.GraphAccelError], text: str) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = tuple(torch.randn(2, 4, WIDTH))
    with refused(error, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=batch)


@pytest.mark.parametrize(
    ("kind", "offset", "source", "shown", "why"),
    [
        (Transformed, 1, "return F.mse_loss(torch.func.grad(self.total)(x), y)", "", TRANSFORM),
        (PerExample, 1, "return F.mse_loss(torch.func.vmap(torch.func.grad(self.total))(x), y)", "torch.func.vmap(torch.func.grad(self.total))(x)", TRANSFORM),
        (Penalty, 2, "(slope,) = torch.autograd.grad(self.total(mixed), mixed, create_graph=True)", "", LOST),
        (OfActivation, 2, "(slope,) = torch.autograd.grad(self.out(hidden).tanh().sum(), hidden, create_graph=True)", "", LOST),
    ],
)  # fmt: skip
def test_a_gradient_in_the_forward(
    kind: type[nn.Module], offset: int, source: str, shown: str, why: str
) -> None:
    number = kind.forward.__code__.co_firstlineno + offset
    shown = shown or source
    text = f"""\
error[GA102]: cannot capture `{kind.__name__}.forward`: this has no graph
  --> test_gradients_inside.py:{number}
{number:>5} |         {source}
      |         {" " * source.index(shown)}{"^" * len(shown)}
  why:  {why}
  help: {DIRECTION}
  explain: graphaccel explain GA102"""
    _refused(kind, errors.CaptureRefused, text)


def test_backward_in_the_forward() -> None:
    number = InForward.forward.__code__.co_firstlineno + 2
    text = f"""\
error[GA104]: cannot capture `InForward.forward`: `backward()` in the forward can not be part of the graph
  --> test_gradients_inside.py:{number}
{number:>5} |         loss.backward()
      |         ^^^^^^^^^^^^^^^
  why:  a step has one backward, after its forward, and `.grad` is written there
  help: return the loss, and call loss.backward() in the script
  explain: graphaccel explain GA104"""
    _refused(InForward, errors.GradientRuleRefused, text)


def _trained(kind: type[nn.Module], planned: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if planned:
        graphaccel.optimize(model, optimizer, devices=1)
    batch = tuple(torch.randn(2, 4, WIDTH).double())
    for _ in range(2):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("kind", [Directional, OfWeight])
def test_those_that_are_kept(kind: type[nn.Module]) -> None:
    want, got = _trained(kind, False), _trained(kind, True)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-14)
