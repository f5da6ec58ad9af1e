"""ZeRO over a part of the data axis, replicated over the rest: the step of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.parity import Reference, compare, reference, run_plan
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (4, {"zero": 1, "microbatches": 1}),
    "zero1-accumulated": (4, {"zero": 1, "microbatches": 2}),
    "zero2": (4, {"zero": 2, "microbatches": 1}),
    "zero2-whole": (4, {"zero": 2, "microbatches": 2}),
    "zero2-shards": (4, {"zero": 2, "microbatches": 2, "accumulation": "shards"}),
    "zero3": (4, {"zero": 3, "microbatches": 1}),
    "zero3-whole": (4, {"zero": 3, "microbatches": 2}),
    "zero3-shards": (4, {"zero": 3, "microbatches": 2, "accumulation": "shards"}),
    "zero3-kept": (4, {"zero": 3, "microbatches": 1, "reshard_after_forward": "never"}),
    "zero3-held": (4, {"zero": 3, "microbatches": 2, "reshard_after_forward": "once_per_step"}),
    "zero1-context2": (8, {"context": 2, "zero": 1, "microbatches": 1}),
    "zero3-tensor2": (8, {"tensor": 2, "zero": 3, "microbatches": 1}),
    "zero2-pipeline2": (8, {"pipeline": 2, "interleave": 1, "zero": 2, "microbatches": 2}),
}


CASES = [("gpt", plan) for plan in PLANS]
CASES += [("resnet", "zero3"), ("llama", "zero2-shards")]
CASES += [pytest.param("t5", "zero3-kept", marks=pytest.mark.release)]


@cache
def _reference(model: str, dtype: str, steps: int) -> Reference:
    return reference(model, dtype, steps)


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_one_step_in_float64_is_that_of_one_device(pool: Pool, model: str, plan: str) -> None:
    world, pins = PLANS[plan]
    pins = {"data": 4, "shard_size": 2, "pipeline": 1, "recompute": "none", **pins}
    got = pool.run(world, run_plan, model, "float64", pins, 2)
    compare(_reference(model, "float64", 2), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)
