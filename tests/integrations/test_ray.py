"""Ray Train's workers by their environment: its variables, its process group, its thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphaccel
from tests.support.pool import Pool

ROWS, STEPS = 8, 3


def loop() -> list[float]:
    """A `train_loop_per_worker` without `prepare_model`: every worker reads the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = graphaccel.optimize(
        model, optimizer, loss_fn=nn.functional.cross_entropy
    )  # Ray says how many
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(ROWS, 6).double(), torch.randint(3, (ROWS,))
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _worker() -> Any:
    """As Ray Train v2 runs it: `_TorchBackend` has set the variables and joined the group in this
    process, and the loop is in a thread of its own."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((loop(), dist.get_world_size()))
        except Exception as error:
            results.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.multiprocess
def test_two_workers_train_as_one_process(pool: Pool) -> None:
    expected = loop()
    for losses, world in pool.run(2, _worker):
        assert world == 2
        assert losses == pytest.approx(expected, abs=1e-12)
