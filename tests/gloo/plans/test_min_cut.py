"""What a min-cut saves instead of what autograd saves: gradients and memory, under plans.

float64, one step: 1e-10 relative on the loss and every gradient; predicted peak tensor bytes within
2 % of measured on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parity import compare, reference, run_plan
from tests.support.pool import Pool

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pipeline": ("gpt", 2, {"pipeline": 2, "microbatches": 4, "recompute": "some"}),
    "weights apart": (
        "gpt", 2,
        {"pipeline": 2, "microbatches": 4, "schedule": "zero_bubble", "recompute": "none"},
    ),
    "zero 3": ("bert", 2, {"data": 2, "zero": 3, "recompute": "none"}),
    "tensor": ("gpt", 2, {"tensor": 2, "recompute": "none"}),
    "fused head": (
        "gpt", 1,
        {"microbatches": 2, "fusions": ("linear_cross_entropy",), "recompute": "none"},
    ),
    "offload": ("gpt", 1, {"offload": "activations", "recompute": "none"}),
}  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", list(CASES))
def test_one_step_is_that_of_one_device(pool: Pool, case: str) -> None:
    model, world, pins = CASES[case]
    got = pool.run(world, run_plan, model, "float64", {**pins, "min_cut": True}, 1)
    compare(reference(model, "float64", 1), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)
