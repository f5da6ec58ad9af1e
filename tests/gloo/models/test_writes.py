"""Models that write into their values: into slices, by masks, by index. Export makes new values of
them; gradients are those of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gloo.scripts.test_semantics import own_gradients, pair
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

ROWS, WIDTH = 8, 8


class Sliced(nn.Module):
    """Writes into slices of zeros, in another dtype and shape, and where a mask says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        out = torch.zeros_like(hidden)
        out[:, 0] = hidden[:, 1]
        out[:, 2:4] = 2 * hidden[:, 4:6]
        out[:, 5] += hidden[:, 5]
        out[:, 6:] = hidden[:, :1].float()
        out[hidden > 1] = 3.0
        out[hidden.sum(1) > 4] = 0.5
        return F.mse_loss(self.second(out), y)


class Changed(nn.Module):
    """Changes a value where it lies, one step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x) * 1
        hidden.mul_(2).add_(1)
        hidden.masked_fill_(hidden > 4, 0.0)
        hidden[:, ::2].copy_(x[:, ::2])
        hidden.clamp_(max=3)
        return F.mse_loss(self.second(hidden), y)


@captures_of("writes")
def _worst(kind: type[nn.Module], pins: dict[str, Any]) -> float:
    torch.manual_seed(5)
    plain, _, planned, _ = pair(lambda: kind().double(), pins)
    batch = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    for model in (plain, planned):
        model(*batch).backward()
    return own_gradients(plain, planned)


@pytest.mark.parametrize("kind", [Sliced, Changed], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "pins", [{"data": 2}, {"pipeline": 2, "microbatches": 4}], ids=["data", "pipeline"]
)
def test_gradients_of_writes(pool: Pool, kind: type[nn.Module], pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _worst, kind, pins)) <= 1e-12
