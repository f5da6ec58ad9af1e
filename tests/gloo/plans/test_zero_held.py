"""ZeRO 3 whose parameters are gathered once a step and held for all microbatches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.parity import Reference, compare, reference, run_plan
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

STEP = {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step", "recompute": "none"}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (2, {"microbatches": 4, "pipeline": 1}),
    "shards": (2, {"microbatches": 2, "pipeline": 1, "accumulation": "shards"}),
    "one": (2, {"microbatches": 1, "pipeline": 1}),
    "tensor2": (4, {"microbatches": 2, "pipeline": 1, "tensor": 2}),
    "pipeline2": (4, {"microbatches": 4, "pipeline": 2, "interleave": 1}),
    "interleaved": (4, {"microbatches": 2, "pipeline": 2, "interleave": 2}),
}
CASES = [("gpt", plan) for plan in PLANS]
CASES += [("llama", "whole"), ("t5", "pipeline2"), ("resnet", "one"), ("bert", "shards")]


@cache
def _reference(model: str, dtype: str, steps: int) -> Reference:
    return reference(model, dtype, steps)


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_one_step_in_float64_is_that_of_one_device(pool: Pool, model: str, plan: str) -> None:
    world, pins = PLANS[plan]
    got = pool.run(world, run_plan, model, "float64", STEP | pins, 2)
    compare(_reference(model, "float64", 2), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)


@pytest.mark.parametrize("plan", ["whole", "pipeline2"])
def test_twenty_float64_steps_are_those_of_one_device(pool: Pool, plan: str) -> None:
    world, pins = PLANS[plan]
    got = pool.run(world, run_plan, "gpt", "float64", STEP | pins, 20)
    compare(_reference("gpt", "float64", 20), got).check(1e-10, 1e-10)
