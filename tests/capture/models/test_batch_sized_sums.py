"""Sums over the examples whose result has a row for each example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import SplitRefused

ROWS = {
    "the identity": lambda h: torch.eye(h.shape[0]) @ h,
    "a running sum": lambda h: torch.ones(h.shape[0], h.shape[0]).tril() @ h,
}


class Net(nn.Module):
    """`forward(x [B, 3], y [B, 2])` → loss; most weights follow what mixes the rows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(3, 3), nn.Linear(3, 2), ROWS[name]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b(self.mix(self.a(x))) - y).square().mean()


@pytest.mark.parametrize("name", ROWS)
def test_the_split_is_refused_in_a_body(name: str) -> None:
    batch = torch.ones(4, 3), torch.ones(4, 2)
    with pytest.raises(SplitRefused, match=r"aten\.mm\.default in the model needs the whole batch"):
        graphaccel.plan(Net(name), batch, devices=2, data=2)
