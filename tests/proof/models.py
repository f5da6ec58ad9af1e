"""Small models whose captured graph is right, and the same with a fault that a capture or a pass
had once: the fault is planted by capturing one model and comparing with the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphaccel.capture.batch import Batch
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import as_batch, model_of
from graphaccel.proof.comparison import Pair, pair_of

ROWS, WIDTH = 6, 5


class Net(nn.Module):
    """Three layers with `middle(net, x)` between the second and the third; returns its loss."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, WIDTH)
        self.scale = 1.0
        self.middle = middle or (lambda _net, x: x)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x))
        hidden = self.middle(self, self.second(hidden))
        return F.mse_loss(self.last(hidden), target)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "reverse"  # of the autograd node, `name()` is torch's own
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def hooked(_net: Net, x: Tensor) -> Tensor:
    """The identity, whose gradient a hook makes a tenth."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.1)
    return x


class Normed(nn.Module):
    """BatchNorm with or without its running statistics; returns its loss."""

    def __init__(self, tracks: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)
        self.tracks = tracks

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.linear(x), self.norm
        if self.tracks:
            return norm(x).square().mean() + x.mean()
        return F.batch_norm(x, None, None, norm.weight, norm.bias, True).square().mean() + x.mean()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same weights every time."""
    torch.manual_seed(3)
    return make()


def batch(targets: bool = True, rows: int = ROWS) -> Batch:
    """[rows, WIDTH], and targets of that shape."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(2, rows, WIDTH, generator=generator)
    return as_batch((x, y) if targets else (x,))


def captured(model: nn.Module, given: Batch, loss_fn: Any = None) -> tuple[Any, Any]:
    """The step of a model, and the sizes of the batch in it."""
    return Captures(model_of(model, loss_fn, None, "cpu")).of(given)


def planted(faulty: nn.Module, true: nn.Module, given: Batch, loss_fn: Any = None) -> Pair:
    """What a capture gives that takes `true` for `faulty`."""
    step, sizes = captured(faulty, given, loss_fn)
    return pair_of(true, loss_fn, step, given, sizes)


@functools.cache
def plain_step() -> Any:
    """The step of `Net()`, captured once."""
    return captured(seeded(Net), batch())


class Layer(nn.Module):
    """x + linear(gelu(x)), with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.middle = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return x + self.middle(self.linear(F.gelu(x + self.shift)))


class Deep(nn.Module):
    """DEEP identical layers between two linear ones; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(DEEP)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.last(x), target)


DEEP = 9


@functools.cache
def deep_step() -> Any:
    """The step of `Deep()`, captured once."""
    return captured(seeded(Deep), batch())
