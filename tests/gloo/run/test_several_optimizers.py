"""Several optimizers of one model: one is given to optimize, and all step as on one device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
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
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "two sided": lambda p: TwoSided(p, lr=0.05),
    "by norm": lambda p: ByNorm(p, lr=0.05),
}


def _built(second: str, *widths: int) -> tuple[Classifier, list[Optimizer]]:
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes, bias=False) for sizes in pairwise((8, *widths, 8))]
    model = Classifier(nn.Sequential(*layers)).double()
    return model, [
        torch.optim.AdamW(model.out.parameters(), lr=0.05),
        SECOND[second](model.inner.parameters()),
    ]


def _train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        x, y = small_batch(seed=step)
        model(x.double(), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _trained(pins: dict[str, Any] | None, second: str) -> dict[str, torch.Tensor]:
    model, optimizers = _built(second)
    if pins is not None:
        graphaccel.optimize(model, optimizers[0], devices=2, **pins)
    _train(model, optimizers, range(3))
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


@captures_of("several optimizers")
def _difference(kind: str, second: str) -> float:
    return furthest(_trained(PLANS[kind], second), _trained(None, second))


CASES = [
    (kind, second)
    for kind in PLANS
    for second in SECOND
    if kind != "pipeline" or second in ("sgd", "adamw", "by norm")  # the others read whole matrices
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


@captures_of("several optimizers")
def _resumed(kinds: tuple[str, ...], second: str, folder: str, planned: bool) -> float:
    """The furthest weight from one device's, of a run that goes on under one plan after another."""
    plain, optimizers = _built(second, 2)  # a shard is as large as what Adafactor has for a row
    _train(plain, optimizers, range(2 * len(kinds)))
    for start, kind in enumerate(kinds):
        model, (first, other) = _built(second, 2)
        x, y = small_batch()
        example = (x.double(), y) if planned else None
        graphaccel.optimize(model, first, devices=2, example_batch=example, **PLANS[kind])
        assert graphaccel.load(folder, model, first, other=other).step == 2 * start
        _train(model, [first, other], range(2 * start, 2 * start + 2))
        graphaccel.save(folder, model, first, step=2 * start + 2, other=other)
    return furthest(graphaccel.full_state_dict(model), plain.state_dict())


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    ("kinds", "second"),
    [
        (("zero3", "zero3"), "sgd"),
        (("data", "zero1", "zero3"), "sgd"),
        (("zero3", "tensor", "zero3"), "adafactor"),
        (("zero1", "zero3"), "adafactor"),
        (("data", "pipeline", "data"), "adamw"),  # each stage counts the steps of the other's
        (("pipeline", "pipeline", "zero1"), "adamw"),
    ],
)
def test_their_state_is_saved_and_loaded(
    pool: Pool, kinds: tuple[str, ...], second: str, planned: bool, tmp_path: Path
) -> None:
    assert max(pool.run(2, _resumed, kinds, second, str(tmp_path), planned)) < 1e-13


def test_a_list_of_optimizers_is_answered_with_what_to_give() -> None:
    model = Classifier()
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.inner, model.out)]
    with pytest.raises(errors.GraphMisuse) as caught:
        graphaccel.optimize(model, optimizers, devices=1)  # type: ignore[arg-type]
    assert "graphaccel.optimize(model, optimizers[0])  # the others step" in str(caught.value)
