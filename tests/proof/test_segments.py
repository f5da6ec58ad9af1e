"""Rows that an op reads by offsets are compared as they are: a few of them would be read past
their end, and torch does not check it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel


class Segments(nn.Module):
    """Sums segments of rows, which `offsets` delimit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        sums = torch.segment_reduce(x * self.scale, "sum", offsets=offsets, axis=0)
        return sums.pow(2).sum()


@pytest.mark.parametrize("pins", [{}, {"microbatches": 2}], ids=["one", "microbatches"])
def test_segments_of_a_batch_train_as_in_eager_mode(
    pins: dict[str, Any], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHACCEL_QUIET", "0")
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 2, 3, 8])
    plain, model = Segments(), Segments()
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1, **pins)
    plain(x, offsets).backward()
    model(x, offsets).backward()
    assert "loss and 1 gradient" in capsys.readouterr().err
    torch.testing.assert_close(model.scale.grad, plain.scale.grad)
