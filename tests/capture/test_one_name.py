"""Modules with batch statistics that are registered under several names."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphaccel

WIDTH = 4


def _unused(model: nn.Module, y: Tensor) -> Tensor:
    return y


def _called(model: nn.Module, y: Tensor) -> Tensor:
    return model.other(y.sin())


def _penalty(model: nn.Module, y: Tensor) -> Tensor:
    return model.other(y) + sum(p.square().sum() for p in model.other.parameters())


class Twice(nn.Module):
    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.use = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), use
        self.other = self.norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.use(self, self.norm(self.layer(x)))
        return (y * torch.arange(WIDTH, dtype=y.dtype)).sin().sum()


@pytest.mark.parametrize("use", [_unused, _called, _penalty])
def test_gradients_and_statistics_are_those_of_eager_mode(
    use: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    torch.manual_seed(1)
    plain = Twice(use).double()
    ours = copy.deepcopy(plain)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours, _ = graphaccel.optimize(ours, optimizer, devices=1)
    for _ in range(2):
        plain(x).backward()
        ours(x).backward()
    grads = [[p.grad for p in model.parameters()] for model in (ours, plain)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(list(ours.buffers()), list(plain.buffers()))
    assert ours.other is ours.norm


class Bank(nn.Module):
    """Buffers by key, as peft's VeRA shares them between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("default", torch.randn(WIDTH, WIDTH))

    def __getitem__(self, key: str) -> Tensor:
        return self._buffers[key]  # not through getattr

    def __contains__(self, key: str) -> bool:
        return key in self._buffers


class Scaled(nn.Module):
    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.bank, self.scale = bank, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.bank["default"] * self.scale if "default" in self.bank else x


def _same_gradients(plain: nn.Module) -> None:
    """Those of an optimized copy are eager's, and what the copy shares stays shared."""
    ours = copy.deepcopy(plain)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours, _ = graphaccel.optimize(ours, optimizer, devices=1, loss_fn=lambda y: y.square().sum())
    plain(x).square().sum().backward()
    ours(x).backward()
    grads = [[p.grad for p in model.parameters()] for model in (ours, plain)]
    torch.testing.assert_close(*grads)
    assert ours[0].bank is ours[2].bank


def test_buffers_that_are_read_by_key() -> None:
    torch.manual_seed(1)
    bank = Bank()
    plain = nn.Sequential(Scaled(bank), nn.Tanh(), Scaled(bank)).double()
    _same_gradients(plain)


class Rows(nn.Module):
    """Rows of a table that are trained, as peft's trainable tokens: two modules of each kind that
    is shared, of which one has buffers and the other has none."""

    def __init__(self, bank: Bank, rows: nn.ParameterDict) -> None:
        super().__init__()
        self.bank, self.rows = bank, rows

    def forward(self, x: Tensor) -> Tensor:
        table = self.bank["default"].index_copy(0, torch.tensor([1]), self.rows["default"])
        return x @ table


def test_shared_modules_with_buffers_and_without() -> None:
    torch.manual_seed(1)
    bank, rows = Bank(), nn.ParameterDict({"default": torch.randn(1, WIDTH)})
    plain = nn.Sequential(Rows(bank, rows), nn.Tanh(), Rows(bank, rows)).double()
    _same_gradients(plain)
