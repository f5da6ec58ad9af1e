"""Sends in parts: loss and gradients of one device, memory as predicted, with 1/t of the bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.parity import Reference, compare, reference, run_plan
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PARTS = {"tensor": 2, "data": 1, "zero": 0, "sequence": False, "scatter_sends": True}
CASES = [
    ("gpt", 4, {"pipeline": 2, "microbatches": 2, "recompute": "all", "schedule": "1f1b"}),
    # the encoder's output goes to every stage of the decoder
    ("t5", 8, {"pipeline": 4, "microbatches": 4, "recompute": "none", "schedule": "1f1b"}),
    (
        "llama",
        4,
        {"pipeline": 2, "microbatches": 2, "recompute": "none", "schedule": "zero_bubble"},
    ),
    ("swin", 4, {"pipeline": 2, "microbatches": 2, "recompute": "some", "interleave": 2}),
]


@cache
def _reference(model: str) -> Reference:
    return reference(model, "float64", 2)


@pytest.mark.parametrize(("model", "world", "pins"), CASES, ids=[case[0] for case in CASES])
def test_parts_give_what_one_device_gives(
    pool: Pool, model: str, world: int, pins: dict[str, Any]
) -> None:
    got = pool.run(world, run_plan, model, "float64", PARTS | pins, 2)
    compare(_reference(model), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)
