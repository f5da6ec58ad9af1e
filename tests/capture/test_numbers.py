"""Forwards that read a value as a Python number, or assert something of it. PYTEST_DONT_REWRITE:
export knows an assertion as Python compiles it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors

WIDTH = 4


def _largest(y: Tensor, x: Tensor) -> Tensor:
    return y * x.abs().max().item()


def _count(y: Tensor, x: Tensor) -> Tensor:
    return y + (x > 0).sum().item()


def _filled(y: Tensor, x: Tensor) -> Tensor:
    return y * torch.full((WIDTH,), x.max().item(), dtype=x.dtype)


def _asserted(y: Tensor, x: Tensor) -> Tensor:
    count = (x > 9).sum().item()
    assert count <= x.numel()
    torch._check(count <= 1000)
    return y


def _with_a_message(y: Tensor, x: Tensor) -> Tensor:
    assert torch.all(x.abs() >= 0).item(), f"of {x.shape}"
    return y


def _negated(y: Tensor, x: Tensor) -> Tensor:
    assert not torch.isnan(x).any(), "no number"
    return y


def _several(y: Tensor, x: Tensor) -> Tensor:
    assert x.numel() > 0 and (x < 9).all() and x.max() < 10, "large"  # noqa: PT018
    return y


def _by_row(y: Tensor, x: Tensor) -> Tensor:
    """A constant with a row for each example."""
    return y * torch.tensor([float(i) for i in range(x.shape[0])], dtype=x.dtype)[:, None]


class Reads(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.layer(x), x).square().sum()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "read",
    [_largest, _count, _filled, _asserted, _with_a_message, _negated, _several, _by_row],
)
def test_gradients_are_those_of_eager_mode(
    read: Callable[[Tensor, Tensor], Tensor], microbatches: int
) -> None:
    torch.manual_seed(1)
    model, x = Reads(read).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = graphaccel.optimize(model, optimizer, devices=1, microbatches=microbatches)
    model(x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


def _another(y: Tensor, x: Tensor) -> Tensor:
    if (x < 0).any():
        return y
    assert x.sum() > 3
    return 2 * y


def _one_of_two(y: Tensor, x: Tensor) -> Tensor:
    assert (x < 0).all() or (x > 9).any()
    return y


@pytest.mark.parametrize("read", [_another, _one_of_two])
def test_a_branch_that_is_not_an_assertion_alone_is_refused(
    read: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model, x = Reads(read).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = graphaccel.optimize(model, optimizer, devices=1)
    with pytest.raises(errors.TensorBranch):
        model(x)
