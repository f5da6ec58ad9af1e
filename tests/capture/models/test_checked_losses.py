"""Losses of torch whose own code asks for values: captured without asking."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel

ROWS, LENGTH, CLASSES = 4, 5, 6


def _gaussian(z: Tensor, y: Tensor) -> Tensor:
    return nn.GaussianNLLLoss()(z[..., 0], y[:, :1].double(), z[..., 1].exp())


def _ctc(z: Tensor, y: Tensor) -> Tensor:
    lengths = (y > 2).sum(1).clamp(min=1)
    given = torch.full((z.shape[0],), z.shape[1])
    scores = z.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, y, given, lengths, zero_infinity=True)


def _ctc_by_numbers(z: Tensor, y: Tensor) -> Tensor:
    given, lengths = (z.shape[1],) * z.shape[0], (2,) * z.shape[0]
    return nn.CTCLoss(reduction="sum")(z.log_softmax(-1).transpose(0, 1), y, given, lengths)


def _ctc_in_one_row(z: Tensor, y: Tensor) -> Tensor:
    lengths = torch.full((z.shape[0],), 2)
    given = torch.full((z.shape[0],), z.shape[1])
    return F.ctc_loss(z.log_softmax(-1).transpose(0, 1), y[:, :2].flatten(), given, lengths)


def _ctc_of_one(z: Tensor, y: Tensor) -> Tensor:
    losses = [
        F.ctc_loss(row.log_softmax(-1), y[0, :2], torch.tensor(LENGTH), torch.tensor(2))
        for row in z[:, None, 0].expand(-1, LENGTH, -1).unbind()
    ]
    return torch.stack(losses).sum()


class Scored(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def _gradients(
    loss: Callable[[Tensor, Tensor], Tensor], microbatches: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Those of eager mode, and ours."""
    torch.manual_seed(1)
    model = Scored(loss).double()
    x = torch.randn(ROWS, LENGTH, 3, dtype=torch.float64)
    y = torch.randint(1, CLASSES, (ROWS, 3))
    expected = torch.autograd.grad(model(x, y), list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = graphaccel.optimize(model, optimizer, devices=1, microbatches=microbatches)
    model(x, y).backward()
    return list(expected), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loss", [_gaussian, _ctc, _ctc_by_numbers, _ctc_in_one_row])
def test_gradients_are_those_of_eager_mode(
    loss: Callable[[Tensor, Tensor], Tensor], microbatches: int
) -> None:
    expected, got = _gradients(loss, microbatches)
    torch.testing.assert_close(got, expected)


def test_one_example_without_a_batch_dim() -> None:
    expected, got = _gradients(_ctc_of_one, 1)
    torch.testing.assert_close(got, expected)
