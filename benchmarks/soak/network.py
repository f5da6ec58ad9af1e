"""The network, batches and plans that the long runs train: tiny, with dropout, in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PLANS: dict[int, dict[str, Any]] = {
    4: {"pipeline": 2, "data": 2, "zero": 3, "microbatches": 2},
    2: {"data": 2, "zero": 3},
}
"""By the number of devices."""


def build(dropout: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network of three layers from a fixed seed, and its AdamW."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout)]
    layers += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 8)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs float32[16, 16] and targets float32[16, 8] of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 16, generator=generator), torch.randn(16, 8, generator=generator)
