"""A forward that branches on whether it is traced (`torch.compiler.is_compiling`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import graphaccel


class Short(nn.Module):
    """A default mask is left out where code is traced, and then missed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[:2], dtype=x.dtype)
        return (self.inner(x) * mask[:, :, None]).square().mean()


def test_a_branch_that_fails_only_where_code_is_traced() -> None:
    torch.manual_seed(0)
    plain = Short().double()
    planned = copy.deepcopy(plain)
    graphaccel.optimize(planned, devices=1)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    losses = [model(x) for model in (plain, planned)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-15)
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-14)


class Wrong(Short):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) + (x.sum() > 0 and 1.0)


class Asks(Short):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            x = x * (1.0 if x.sum() < 0 else 2.0)
        return super().forward(x, torch.ones(3, 2)) + (x.mean() > 0 and 1.0)


def _refused(model: nn.Module) -> str:
    graphaccel.optimize(model, devices=1)
    with pytest.raises(graphaccel.GraphAccelError) as raised:
        model(torch.randn(3, 2, 4))
    return str(raised.value)


def test_of_two_failures_the_one_that_eager_code_reaches_is_told() -> None:
    """What is missed where code is traced (the mask) is no failure of the user's code."""
    assert "(x.sum() > 0 and 1.0)" in _refused(Wrong())


def test_of_two_branches_the_one_of_traced_code_is_told() -> None:
    """Code asks for values where it is not traced alone, to check its input."""
    assert "(x.mean() > 0 and 1.0)" in _refused(Asks())
