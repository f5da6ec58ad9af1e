"""torch's own layers for sequences, which lay the batch inside of merged dims and write in place:
loss and gradients are those of eager mode under every kind of plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gloo.scripts.test_semantics import own_gradients, pair
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

ROWS, STEPS, WIDTH = 8, 5, 16


class Encoder(nn.Module):
    """As the tutorials write it: a causal mask and the mask of padding; sequence or batch first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(STEPS, dtype=x.dtype)
        padding = x[:, :, 0] > 1.5
        padding = padding & (torch.arange(STEPS) > 0)
        hidden = x if self.batch_first else x.transpose(0, 1)
        hidden = self.layers(hidden, mask=causal, src_key_padding_mask=padding)
        hidden = self.head(hidden)
        return F.mse_loss(hidden if self.batch_first else hidden.transpose(0, 1), y)


class Attention(nn.Module):
    """Attention whose weights are read, and labels that are smoothed and weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 7)
        self.register_buffer("weight", torch.arange(1.0, 8.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = x.transpose(0, 1)
        hidden, weights = self.attention(hidden, hidden, hidden)
        labels = (y[:, 0, 0].abs() * 5).long() % 7
        scores = self.head(hidden[0])
        loss = F.cross_entropy(scores, labels, weight=self.weight, label_smoothing=0.1)
        return loss + weights.square().mean()


class Recurrent(nn.Module):
    """The three recurrent layers, whose last states are read as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, (last, cell) = self.lstm(x)
        hidden, _ = self.gru(hidden.transpose(0, 1))
        hidden, _ = self.rnn(hidden.transpose(0, 1))
        return F.mse_loss(hidden, y) + last.square().mean() + cell.mean()


class Normed(nn.Module):
    """Statistics of each example's own channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(STEPS, affine=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.norm(x)), y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Encoder(True),
    "encoder, sequence first": lambda: Encoder(False),
    "attention": Attention,
    "recurrent": Recurrent,
    "instance norm": Normed,
}
PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "microbatches": {"data": 2, "zero": 3, "microbatches": 2, "recompute": "all"},
    "pipeline": {"pipeline": 2, "microbatches": 4},
    "tensor": {"tensor": 2},
}
CASES = [(m, p) for m in MODELS for p in PLANS if p != "tensor" or m.startswith("encoder")]


def _differences(model: str, pins: dict[str, Any]) -> tuple[float, float]:
    torch.manual_seed(5)
    plain, _, planned, _ = pair(lambda: MODELS[model]().double(), pins)
    x, y = torch.randn(2, ROWS, STEPS, WIDTH, dtype=torch.float64)
    losses = []
    with captures_of(f"sequences {model}"):
        for each in (plain, planned):
            loss = each(x, y)
            loss.backward()
            losses.append(float(loss))
    return abs(losses[0] - losses[1]), own_gradients(plain, planned)


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_loss_and_gradients(pool: Pool, model: str, plan: str) -> None:
    for loss, gradients in pool.run(2, _differences, model, PLANS[plan]):
        assert loss <= 1e-12
        assert gradients <= 1e-10
