"""Several optimizers of one model: one is given to optimize, and all step as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import graphaccel
from graphaccel import errors
from tests.gloo.scripts.test_semantics import furthest
from tests.gloo.scripts.test_whole_matrices import ByNorm, TwoSided
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("data", "zero1", "zero3", "pipeline", "tensor")
SECOND: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "two sided": lambda p: TwoSided(p, lr=0.05),
    "by norm": lambda p: ByNorm(p, lr=0.05),
}


def _trained(pins: dict[str, Any] | None, second: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Classifier(nn.Linear(8, 8, bias=False)).double()
    optimizers: list[Optimizer] = [
        torch.optim.AdamW(model.out.parameters(), lr=0.05),
        SECOND[second](model.inner.parameters()),
    ]
    if pins is not None:
        graphaccel.optimize(model, optimizers[0], devices=2, **pins)
    for step in range(3):
        x, y = small_batch(seed=step)
        model(x.double(), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


@captures_of("several optimizers")
def _difference(kind: str, second: str) -> float:
    return furthest(_trained(PLANS[kind], second), _trained(None, second))


CASES = [
    (kind, second)
    for kind in PLANS
    for second in SECOND
    if kind != "pipeline" or second in ("sgd", "by norm")  # the others read whole matrices
]


@pytest.mark.parametrize(("kind", "second"), CASES)
def test_each_steps_as_on_one_device(pool: Pool, kind: str, second: str) -> None:
    assert max(pool.run(2, _difference, kind, second)) < 1e-13


@captures_of("several optimizers")
def _refusal(second: str) -> str:
    try:
        _trained(PLANS["pipeline"], second)
    except (errors.ElsewhereNeeded, errors.RankLost) as error:
        return error.code
    return ""


@pytest.mark.parametrize("second", ["adafactor", "two sided"])
def test_what_reads_a_matrix_of_another_stage_is_refused(pool: Pool, second: str) -> None:
    assert "GA408" in pool.run(2, _refusal, second)


def test_a_list_of_optimizers_is_answered_with_what_to_give() -> None:
    model = Classifier()
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.inner, model.out)]
    with pytest.raises(errors.GraphMisuse) as caught:
        graphaccel.optimize(model, optimizers, devices=1)  # type: ignore[arg-type]
    assert "graphaccel.optimize(model, optimizers[0])  # the others step" in str(caught.value)
