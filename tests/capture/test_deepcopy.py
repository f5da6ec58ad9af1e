"""`copy.deepcopy` of a tensor in a forward: a copy that no gradient goes through."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel


class Copying(nn.Module):
    """Copies its input, its buffer and its weight, and a cache of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mine = copy.deepcopy(x)
        mine[:, 0] = 0
        first, second = copy.deepcopy([self.offset] * 2)
        first += 1
        weight = copy.deepcopy(self.layer.weight)
        return F.mse_loss(self.layer(mine) + first * second + x @ weight, y)


class OfActivation(nn.Module):
    """Copies what has a gradient: an error in eager mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(copy.deepcopy(self.layer(x)), y)


def test_copies_are_eagers() -> None:
    torch.manual_seed(0)
    eager = Copying().double()
    ours = copy.deepcopy(eager)
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)
    ours, _ = graphaccel.optimize(
        ours, torch.optim.SGD(ours.parameters(), lr=0.1), devices=1, microbatches=2
    )
    losses = [model(x, y) for model in (eager, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for got, true in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, true.grad, rtol=1e-12, atol=1e-12)


def test_a_copy_of_an_activation_is_refused_as_eager_refuses_it() -> None:
    model = OfActivation()
    model, _ = graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        model(torch.randn(4, 4), torch.randn(4, 4))
