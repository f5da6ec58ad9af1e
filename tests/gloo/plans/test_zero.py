"""ZeRO on the data axis: the step of one device, with 1/N of state, gradients, parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import graphaccel
from tests.support.parity import (
    Reference,
    compare,
    least_peaks,
    reference,
    run_plan,
    stored,
    tensors_alive,
)
from tests.support.pool import Pool
from tests.support.zoo import ALL, ZOO

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"data": 2, "zero": 1, "microbatches": 1}),
    "zero2": (2, {"data": 2, "zero": 2, "microbatches": 2}),
    "zero2-shards": (2, {"data": 2, "zero": 2, "microbatches": 2, "accumulation": "shards"}),
    "zero3": (2, {"data": 2, "zero": 3, "microbatches": 1}),
    "zero3-whole": (2, {"data": 2, "zero": 3, "microbatches": 4}),
    "zero3-shards": (2, {"data": 2, "zero": 3, "microbatches": 2, "accumulation": "shards"}),
    "zero3-kept": (2, {"data": 2, "zero": 3, "microbatches": 1, "reshard_after_forward": "never"}),
    "zero3-tensor2": (4, {"data": 2, "tensor": 2, "zero": 3, "microbatches": 1}),
    "zero3-pipeline2": (
        4,
        {"data": 2, "zero": 3, "pipeline": 2, "interleave": 1, "microbatches": 2},
    ),
}
# Every way on one model, the three levels on all others in turn; the rest by benchmarks.parity.
CASES = [("gpt", plan) for plan in PLANS]
CASES += [
    (model, ("zero1", "zero2-shards", "zero3")[i % 3])
    for i, model in enumerate(m for m in ZOO if m != "gpt")
]


@cache
def _reference(model: str, dtype: str, steps: int) -> Reference:
    return reference(model, dtype, steps)


def pins_for(model: str, plan: str, recompute: str = "none") -> tuple[int, dict[str, Any]]:
    """World size and pins; a model that mixes rows (BatchNorm) has one microbatch."""
    world, pins = PLANS[plan]
    pins = {"pipeline": 1, "recompute": recompute, **pins}
    if ALL[model].mixes_rows:
        pins["microbatches"] = 1
        pins.pop("accumulation", None)
    return world, pins


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_one_step_in_float64_is_that_of_one_device(pool: Pool, model: str, plan: str) -> None:
    world, pins = pins_for(model, plan)
    got = pool.run(world, run_plan, model, "float64", pins, 2)
    compare(_reference(model, "float64", 2), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)


@pytest.mark.parametrize("recompute", ["selective", "all"])
@pytest.mark.parametrize("plan", ["zero3", "zero3-kept"])
def test_the_peak_where_blocks_are_recomputed(pool: Pool, plan: str, recompute: str) -> None:
    """Then it lies in the backward, where gradients are on their way."""
    world, pins = pins_for("gpt", plan, recompute)
    for rank in pool.run(world, run_plan, "gpt", "float64", pins, 1):
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.005)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", "zero3-tensor2"),
        pytest.param("t5", "zero3-pipeline2", marks=pytest.mark.release),
    ],
)
def test_one_step_with_blocks_recomputed_selectively(pool: Pool, model: str, plan: str) -> None:
    world, pins = pins_for(model, plan, "selective")
    got = pool.run(world, run_plan, model, "float64", pins, 2)
    compare(_reference(model, "float64", 2), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)


@pytest.mark.parametrize(("model", "plan"), [("gpt", "zero3"), ("llama", "zero1")])
def test_twenty_float32_steps_keep_the_loss_of_one_device(
    pool: Pool, model: str, plan: str
) -> None:
    world, pins = pins_for(model, plan)
    got = pool.run(world, run_plan, model, "float32", pins, 20)
    expected = _reference(model, "float32", 20)
    for rank in got:
        for step, (ours, theirs) in enumerate(zip(rank["losses"], expected.losses, strict=True)):
            assert ours == pytest.approx(theirs, rel=1e-5), f"step {step}"


def _bytes(world: int, zero: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes on this rank, as measured and as predicted, and of all parameters."""
    others = [tensor.untyped_storage() for tensor in tensors_alive()]
    model, batch, _ = ZOO["gpt"].build()
    whole = sum(p.numel() * 4 for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=world, data=world, pipeline=1, zero=zero,
                        microbatches=1, recompute="none")  # fmt: skip
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    measured = {
        "parameter": stored(model.parameters()),
        "gradient": stored(p.grad for p in model.parameters()),
        "optimizer": stored(state),
    }
    optimizer.zero_grad()
    del state
    (measured["peak"], _), _ = least_peaks(model, batch, None, others)
    (memory,) = model.graphaccel.plan.prediction.memory
    predicted = {"parameter": memory.parameter, "optimizer": memory.optimizer}
    predicted["peak"] = model.graphaccel.predicted_pass_bytes
    return measured, predicted, whole


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_holds_its_share(pool: Pool, world: int, zero: int) -> None:
    for measured, predicted, whole in pool.run(world, _bytes, world, zero):
        assert measured["optimizer"] == predicted["optimizer"] == 2 * whole // world
        assert measured["gradient"] == (whole // world if zero > 1 else whole)
        assert measured["parameter"] == (whole // world if zero > 2 else whole)
        assert predicted["parameter"] == measured["parameter"]
        assert predicted["peak"] == pytest.approx(measured["peak"], rel=0.02)
