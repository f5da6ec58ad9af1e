"""Chains of writes through views: loss and gradients of the captured graph equal eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphaccel.proof.comparison import Setting
from tests.proof.models import WIDTH, batch, planted


def _diagonal_then_fill(c: Tensor) -> Tensor:
    on = torch.diagonal(c).add_(-1).pow_(2).sum()
    return on + c.fill_diagonal_(0).pow_(2).sum()


def _fill(c: Tensor) -> Tensor:
    return c.fill_diagonal_(0.5).pow(2)


def _tall(c: Tensor) -> Tensor:
    return c[:, :3].contiguous().fill_diagonal_(2.0).exp() + c[:, :3]


def _wrapped(c: Tensor) -> Tensor:
    return torch.cat([c, c, c]).fill_diagonal_(1.0, wrap=True).sin()


def _cube(c: Tensor) -> Tensor:
    return c[:3, :1, None].expand(3, 3, 3).contiguous().fill_diagonal_(1.0).square()


def _strided(c: Tensor) -> Tensor:
    c.as_strided((2, 2), (WIDTH, 2), 1).mul_(3).add_(c[0, 0])
    return c.tanh()


def _shifted(c: Tensor) -> Tensor:
    torch.diagonal(c, 1).add_(1).mul_(3)
    c.T[1:, 0].mul_(2).sub_(c[2, 1])
    return c.square()


def _nested(c: Tensor) -> Tensor:
    view = c[1:].view(-1)[::2]
    view.mul_(2).clamp_(min=-0.5).add_(view)
    c.select(1, 2).copy_(c[0].clone()).mul_(3)
    return c * c.unfold(1, 2, 1).sum()


def _parts(c: Tensor) -> Tensor:
    first, second = c[:, :2], c.narrow(1, 2, 3)
    first.add_(second[:, :2])
    second.unsqueeze(0).transpose(1, 2)[0, 1].clamp_(max=0.1)
    c.masked_fill_(torch.eye(WIDTH, dtype=torch.bool), 0.25)
    return c.cumsum(0)


CHAINS = (
    _diagonal_then_fill,
    _fill,
    _tall,
    _wrapped,
    _cube,
    _strided,
    _shifted,
    _nested,
    _parts,
)


class Chained(nn.Module):
    """A chain of writes into the [WIDTH, WIDTH] correlations of a layer's outputs; their sum."""

    def __init__(self, chain: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.chain = nn.Linear(WIDTH, WIDTH), chain

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return self.chain(z.T @ z / len(x)).sum()


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_writes_has_the_gradients_of_eager_code(
    chain: Callable[[Tensor], Tensor],
) -> None:
    model = Chained(chain)
    found = planted(model, model, batch(targets=False)).compare(Setting(wide=True))
    assert len(found) == 3
    assert not [str(one) for one in found if one.wrong]
