"""Small models for tests of bad input: one linear layer inside, a cross entropy outside."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphaccel.kernels.fusion import T

DOUBLED = MappingProxyType(
    {
        "inputs": {"x": T("... d")},
        "outputs": {"y": T("... d")},
        "devices": (),  # "auto" must not place it in the models of other tests
        "pattern": lambda x: x * 2,
        "forward": lambda x: x * 2,
    }
)
"""Parts of a fusion, y = 2 x."""

WIDTH = 8
CLASSES = 4


class Classifier(nn.Module):
    """`forward(x, y)`: x [B, 8] float, y [B] int64 → mean cross entropy; inner: [B, 8] → [B, 8]."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH) if inner is None else inner
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.inner(x)), y)


class WithLogits(Classifier):
    """The same, returning a dict of loss and logits [B, 4]."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.out(self.inner(x))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def small_batch(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch for `Classifier`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def used_optimizer(model: nn.Module, batch: Any = None) -> torch.optim.AdamW:
    """An AdamW of the model, with the state of one step where a batch is given."""
    optimizer = torch.optim.AdamW(model.parameters())
    if batch is not None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
