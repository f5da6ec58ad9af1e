"""Every plan gives the loss and the gradients of one device: models x plans x recomputation.

float64, one step: 1e-10 relative on the loss and every gradient. float32: 1e-5 on the loss over 20
optimizer steps. Predicted peak tensor bytes within 2 % of measured on every rank of every one.
`python -m benchmarks.parity` runs all combinations; here each model has two plans, each plan four
models, and the recomputation goes round.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.parity import Reference, compare, reference, run_plan
from tests.support.pool import Pool
from tests.support.zoo import ZOO

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "data2": (2, {"data": 2}),
    "pipeline2": (2, {"pipeline": 2, "schedule": "1f1b", "microbatches": 4}),
    "pipeline4": (4, {"pipeline": 4, "schedule": "1f1b", "microbatches": 4}),
    "data2-pipeline2": (4, {"data": 2, "pipeline": 2, "schedule": "1f1b", "microbatches": 2}),
    "pipeline2-interleave2": (2, {"pipeline": 2, "interleave": 2, "microbatches": 2}),
}
ZERO_BUBBLE: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline2-zero_bubble": (2, {"pipeline": 2, "schedule": "zero_bubble", "microbatches": 4}),
    "pipeline4-zero_bubble": (4, {"pipeline": 4, "schedule": "zero_bubble", "microbatches": 4}),
    "data2-pipeline2-zero_bubble": (
        4,
        {"data": 2, "pipeline": 2, "schedule": "zero_bubble", "microbatches": 2},
    ),
}
RECOMPUTE = ("none", "some", "selective", "all")
CASES = [
    pytest.param(model, plan, RECOMPUTE[(i + j) % 4], id=f"{model}-{plan}-{RECOMPUTE[(i + j) % 4]}")
    for i, model in enumerate(ZOO)
    for j, plan in enumerate(PLANS)
    if (j - i) % len(PLANS) in (0, 2)
]
APART = [
    ("gpt", "pipeline2-zero_bubble", "none"),
    ("t5", "pipeline4-zero_bubble", "some"),
    ("vit", "data2-pipeline2-zero_bubble", "all"),
    ("gpt", "pipeline2-zero_bubble", "selective"),
]


@cache
def _reference(model: str, dtype: str, steps: int) -> Reference:
    return reference(model, dtype, steps)


def pins_for(model: str, plan: str, recompute: str) -> tuple[int, dict[str, Any]]:
    """World size and pins; a model that mixes rows (BatchNorm) has one microbatch."""
    world, pins = {**PLANS, **ZERO_BUBBLE}[plan]
    pins = pins | {"recompute": recompute, "zero": 0}
    if ZOO[model].mixes_rows:
        pins["microbatches"] = 1
    return world, pins


@pytest.mark.multiprocess
@pytest.mark.parametrize(("model", "plan", "recompute"), CASES + APART)
def test_one_step_in_float64_is_that_of_one_device(
    pool: Pool, model: str, plan: str, recompute: str
) -> None:
    world, pins = pins_for(model, plan, recompute)
    got = pool.run(world, run_plan, model, "float64", pins, 1)
    compare(_reference(model, "float64", 1), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)


@pytest.mark.multiprocess
@pytest.mark.parametrize("model", list(ZOO)[::4])
def test_twenty_float32_steps_keep_the_loss_of_one_device(pool: Pool, model: str) -> None:
    plan = list(PLANS)[list(ZOO).index(model) % len(PLANS)]
    world, pins = pins_for(model, plan, "some")
    got = pool.run(world, run_plan, model, "float32", pins, 20)
    expected = _reference(model, "float32", 20)
    for rank in got:
        for step, (ours, theirs) in enumerate(zip(rank["losses"], expected.losses, strict=True)):
            assert ours == pytest.approx(theirs, rel=1e-5), f"step {step}"
