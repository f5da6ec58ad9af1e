"""A small model that returns several things, and no loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Heads(nn.Module):
    """x [B, 8] → {"a": [B, 4], "rest": (b [3, B], choice int64 [B], size [], weight []), "n": 3}.

    size is a mean over the batch, weight depends on no example; b carries the batch on dim 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.a = nn.Linear(16, 4)
        self.b = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.trunk(x))
        rest = (self.b(h).t(), h.argmax(-1), h.square().mean(), self.a.weight.square().sum())
        return {"a": self.a(h), "rest": rest, "n": 3}


def heads() -> Heads:
    """In float64, the same bits every time."""
    torch.manual_seed(5)
    return Heads().double()


def rows(seed: int = 0, count: int = 8) -> Tensor:
    """float64 [count, 8]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 8, generator=generator, dtype=torch.float64)
