"""Models whose batch is no leading dim, on two processes: equal to eager in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.capture.test_batch_dims import Stated, TimeMajor
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


class Translator(nn.Module):
    """`nn.Transformer` over (time, batch) tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
        self.out = nn.Linear(8, 12)

    def forward(self, source: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        hidden = self.inner(self.words(source), self.words(target))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), wanted.flatten())


def _batch(name: str, seed: int, rows: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(0, 12, shape, generator=generator)

    if name == "translator":
        return tokens(5, rows), tokens(3, rows), tokens(3, rows)
    if name == "stated":
        state = numbers(1, rows, 4), numbers(1, rows, 4)
        return numbers(rows, 2, 4), numbers(rows, 2, 4), state
    return numbers(3, rows, 4), numbers(3, rows, 4)


MODELS = {"time-major": TimeMajor, "stated": Stated, "translator": Translator}


def _trained(name: str, pins: dict[str, Any]) -> float:
    torch.manual_seed(0)
    plain = MODELS[name]().double()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], **pins)
    furthest = 0.0
    for step in range(3):
        batch = _batch(name, step, rows=4 if step < 2 else 8)
        losses = []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        furthest = max(furthest, abs(losses[0] - losses[1]))
    state = graphaccel.full_state_dict(ours)
    return max(
        furthest, *((state[n] - v).abs().max().item() for n, v in plain.state_dict().items())
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_is_found(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _trained, name, {"data": 2})) < 1e-12


def test_the_batch_is_said_and_split_over_microbatches(pool: Pool) -> None:
    pins = {"data": 2, "microbatches": 2, "batch_dims": {"x": 1, "y": 1}}
    assert max(pool.run(2, _trained, "time-major", pins)) < 1e-12
