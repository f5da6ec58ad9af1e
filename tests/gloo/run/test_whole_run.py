"""All of a run is restored, under its plan and under another: schedule, loss scale, position in the
data, and the random states of every rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphaccel
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("data", "zero1", "zero3", "pipeline", "tensor")
OVERFLOW = 2
"""The step, counted from 0, whose gradients overflow: the scale is not the first one after it."""


class _Data:
    """Batches in an order of its own, which knows how far it is."""

    def __init__(self, seed: int) -> None:
        self.generator, self.place = torch.Generator().manual_seed(seed), 0

    def next(self) -> tuple[Tensor, Tensor]:
        seed = int(torch.randint(1000, (), generator=self.generator))
        x, y = small_batch(seed=seed)
        if self.place == OVERFLOW:
            x[-1] *= 1e4
        self.place += 1
        return x, y

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.generator.set_state(state["generator"])


class _Run:
    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.data = _Data(seed)
        given = {"devices": 2, "precision": "fp16", "example_batch": small_batch()}
        graphaccel.optimize(self.model, self.optimizer, **given, **PLANS[kind])
        self.model.graphaccel.session.scale.interval = 4
        random.seed(seed)
        np.random.seed(seed)

    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "data": self.data}

    def train(self, steps: int) -> list[Any]:
        """Of each step, what a run can be told by."""
        results = []
        for _ in range(steps):
            loss = self.model(*self.data.next())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            drawn = random.random(), np.random.rand(), torch.rand(()).item()
            scale, rate = self.model.graphaccel.loss_scale, self.scheduler.get_last_lr()[0]
            results.append((loss.item(), scale, rate, self.data.place, *drawn))
        return results


@captures_of("whole run")
def _resumed(kind: str, other: str, folder: str) -> tuple[list[Any], list[Any], list[Any]]:
    run = _Run(kind, seed=1)
    rank = torch.distributed.get_rank()
    torch.manual_seed(
        10
    )  # dropout is drawn from it, alike; from the others each rank draws its own
    random.seed(rank)
    np.random.seed(rank)
    run.train(4)
    graphaccel.save(folder, run.model, run.optimizer, step=4, epoch=2, **run.parts())
    expected = run.train(4)
    results = []
    for plan in (kind, other):
        again = _Run(plan, seed=7)
        loaded = graphaccel.load(folder, again.model, again.optimizer, **again.parts())
        assert (loaded.step, loaded.more) == (4, {"epoch": 2})
        results.append(again.train(4))
    return expected, results[0], results[1]


@pytest.mark.parametrize(
    ("kind", "other"), list(zip(PLANS, [*list(PLANS)[1:], "data"], strict=True))
)
def test_everything_goes_on(pool: Pool, kind: str, other: str, tmp_path: Path) -> None:
    ranks = pool.run(2, _resumed, kind, other, str(tmp_path))
    for expected, same, moved in ranks:
        assert same == expected
        assert [step[1:4] for step in moved] == [step[1:4] for step in expected]
        assert [step[-3:-1] for step in moved] == [step[-3:-1] for step in expected]
        assert expected[0][1] == 32768.0  # the scale after the overflow
    own = [expected[0][-3:-1] for expected, *_ in ranks]
    assert own[0] != own[1]
