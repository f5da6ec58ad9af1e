"""Writes where a mask is true: the shape of neither the write nor its gradient depends on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import graphaccel


class Marked(nn.Module):
    """Replaces the vectors of one token, as models of images and text do."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.table, self.mark = nn.Embedding(6, 4), nn.Parameter(torch.randn(4))
        self.written = written

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.table(ids)
        mask = ids == 3
        if self.written == "row":
            vectors[mask] = self.mark.to(vectors.dtype)
        elif self.written == "rows of one":
            vectors[mask] = self.mark[None, :]
        elif self.written == "number":
            vectors[mask] = 2.0
        else:
            vectors[mask] = self.mark.sum()
        return vectors.square().mul(torch.arange(4.0)).sum()


@pytest.mark.parametrize("written", ["row", "rows of one", "number", "sum"])
def test_a_row_written_where_a_token_stands(written: str) -> None:
    torch.manual_seed(0)
    plain = Marked(written).double()
    planned = copy.deepcopy(plain)
    graphaccel.optimize(planned, devices=1)
    for ids in (torch.tensor([[1, 3, 5], [3, 3, 0]]), torch.tensor([[1, 2, 5], [0, 1, 0]])):
        for model in (plain, planned):
            model.zero_grad()
            model(ids).backward()
        for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
            expected = torch.zeros_like(a) if a.grad is None else a.grad
            actual = torch.zeros_like(b) if b.grad is None else b.grad
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
