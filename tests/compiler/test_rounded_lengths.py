"""Sizes that a model divides: two captures do not tell how the quotient is rounded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel

WORDS, WIDTH = 11, 4


class Halved(nn.Module):
    """Divides by half of the length, in whole numbers; `forward(tokens)`: [B, T] → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens).square().sum() / (tokens.shape[1] // 2)


class Scaled(Halved):
    """Multiplies by the inverse of half of the length, a float."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens).square().sum() * (1.0 / (tokens.shape[1] // 2))


class Strided(Halved):
    """A convolution that takes every other position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Conv1d(WIDTH, WIDTH, 3, 2, 1), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.inner(self.words(tokens).transpose(1, 2)).relu().mean(-1)
        return F.cross_entropy(self.out(mixed), tokens[:, 0])


class HalfOfTheRows(Halved):
    """Divides by half of the number of examples."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens).square().sum() / (tokens.shape[0] // 2)


@pytest.mark.parametrize("kind", [Halved, Scaled, Strided, HalfOfTheRows])
@pytest.mark.parametrize("first", [(4, 9), (4, 8), (5, 7)], ids=str)
def test_losses_at_other_sizes_are_those_of_eager(
    kind: type[Halved], first: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    plain = kind().double()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1])
    for rows, length in (first, (4, 14), (5, 9), (4, 12), (6, 7)):
        tokens = torch.arange(rows * length).view(rows, length) % WORDS
        losses = []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, ours.state_dict()[name], rtol=1e-12, atol=1e-14)


class Hardest(Halved):
    """The mean over a part of the examples, those of the largest loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        losses = self.words(tokens).square().sum((1, 2))
        return losses.topk(int(len(losses) * 0.3) + 1).values.mean()


def test_a_part_of_the_rows_at_each_size_is_that_of_eager() -> None:
    """Of 14 and 16 rows the part has 5, of 7 it has 3: as a line through 14 and 28 says, too."""
    torch.manual_seed(0)
    plain = Hardest().double()
    planned = graphaccel.optimize(copy.deepcopy(plain), devices=1)
    for rows in (8, 6, 14, 8, 7, 9, 21, 28):
        tokens = torch.randint(0, WORDS, (rows, 4))
        torch.testing.assert_close(planned(tokens), plain(tokens), rtol=1e-12, atol=0)
