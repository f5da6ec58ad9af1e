"""A number that is not equal to itself tells no two captures apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.capture.symbols import BATCH
from tests.support.steps import WIDTH, batch_of


class Marked(nn.Module):
    """Marks rows with NaN, in a number and in a table, and leaves them out of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = torch.tensor([1.0, float("nan")], dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        marked = self.layer(x).masked_fill(y > 1, float("nan")) * self.table[0]
        return torch.nan_to_num(marked - y).square().sum()


def test_the_batch_has_a_symbol() -> None:
    step = capture(Marked().double(), flatten_call(batch_of(), {}))
    assert BATCH in step.sizes
