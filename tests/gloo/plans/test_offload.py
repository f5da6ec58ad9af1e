"""Optimizer state on the host: the step of one device, and device memory without the state."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.parity import Reference, compare, reference, run_plan
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PIPELINE = {"pipeline": 2, "interleave": 1, "microbatches": 4, "data": 1}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {"data": 1, "microbatches": 1}),
    "one device, microbatches": (1, {"data": 1, "microbatches": 4}),
    "data": (2, {"data": 2, "microbatches": 1, "zero": 0}),
    "zero1": (2, {"data": 2, "zero": 1, "microbatches": 1}),
    "zero2-shards": (2, {"data": 2, "zero": 2, "microbatches": 2, "accumulation": "shards"}),
    "zero3": (2, {"data": 2, "zero": 3, "microbatches": 1}),
    "tensor2": (2, {"data": 1, "tensor": 2, "microbatches": 1}),
    "pipeline": (2, PIPELINE),
    "zero1-replicated": (4, {"data": 4, "zero": 1, "shard_size": 2, "microbatches": 1}),
    "zero3-pipeline2": (4, {**PIPELINE, "data": 2, "zero": 3, "microbatches": 2}),
}


@cache
def reference_of(model: str, steps: int) -> Reference:
    return reference(model, "float64", steps)


def run_away(
    pool: Pool, model: str, plan: tuple[int, dict[str, Any]], steps: int, offload: str
) -> list[dict[str, Any]]:
    """`run_plan` of a plan, (processes, pins), with that on the host; of each rank."""
    world, pins = plan
    wanted = {"pipeline": 1, "recompute": "none", **pins, "offload": offload, "devices": world}
    return pool.run(world, run_plan, model, "float64", wanted, steps)


def check_twenty(pool: Pool, plan: tuple[int, dict[str, Any]], offload: str) -> None:
    """Twenty steps are those of one device, in the memory that is predicted."""
    got = run_away(pool, "gpt", plan, 20, offload)
    compare(reference_of("gpt", 20), got).check(1e-9, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)
        assert rank["host_predicted"] == pytest.approx(rank["host_measured"], rel=0.02)


@pytest.mark.parametrize("plan", PLANS)
def test_twenty_steps_are_those_of_one_device(pool: Pool, plan: str) -> None:
    check_twenty(pool, PLANS[plan], "optimizer")


@pytest.mark.parametrize(("model", "plan"), [("resnet", "data"), ("t5", "pipeline")])
def test_other_models(pool: Pool, model: str, plan: str) -> None:
    got = run_away(pool, model, PLANS[plan], 3, "optimizer")
    compare(reference_of(model, 3), got).check(1e-9, 1e-10)


def test_the_device_has_the_state_no_more(pool: Pool) -> None:
    kept = run_away(pool, "gpt", PLANS["zero1"], 2, "none")
    away = run_away(pool, "gpt", PLANS["zero1"], 2, "optimizer")
    for with_state, without in zip(kept, away, strict=True):
        spared = with_state["peak_measured"] - without["peak_measured"]
        # parameter, gradient and two moments, of which the moments leave the device
        assert spared == pytest.approx(without["host_measured"] / 2, rel=0.02)
        assert with_state["host_measured"] == with_state["host_predicted"] == 0
