"""Parameters that are cast once a step, and held so for all microbatches: bit for bit the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.parity import run_plan
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation": (1, {"microbatches": 4}),
    "zero1": (2, {"data": 2, "zero": 1, "microbatches": 2}),
    "zero2": (2, {"data": 2, "zero": 2, "microbatches": 2, "accumulation": "shards"}),
    "tensor": (2, {"tensor": 2, "microbatches": 2, "recompute": "all"}),
    "pipeline": (2, {"pipeline": 2, "interleave": 1, "microbatches": 4}),
    "weights apart": (2, {"pipeline": 2, "schedule": "zero_bubble", "microbatches": 4}),
    "interleaved": (2, {"pipeline": 2, "interleave": 2, "microbatches": 2}),
}
CASES = [
    ("gpt", "accumulation", "bf16"),
    ("gpt", "zero1", "bf16-params"),
    ("gpt", "weights apart", "bf16"),
    ("gpt", "interleaved", "bf16-params"),
    ("llama", "tensor", "bf16"),
    ("llama", "zero2", "bf16"),
    ("t5", "pipeline", "bf16-params"),
    ("bert", "accumulation", "fp16"),
]


@pytest.mark.parametrize(("model", "plan", "precision"), CASES)
def test_steps_are_bitwise_those_of_a_cast_in_each_microbatch(
    pool: Pool, model: str, plan: str, precision: str
) -> None:
    world, pins = PLANS[plan]
    each, once = (
        pool.run(
            world, run_plan, model, "float32",
            {"recompute": "none", "precision": precision, **pins, "cast_once": cast_once}, 3,
        )
        for cast_once in (False, True)
    )  # fmt: skip
    for a, b in zip(each, once, strict=True):
        assert a["losses"] == b["losses"]
        for kind in ("grads", "state"):
            assert a[kind].keys() == b[kind].keys()
            assert all(torch.equal(value, b[kind][name]) for name, value in a[kind].items())
            assert not any(v.dtype in (torch.bfloat16, torch.float16) for v in b[kind].values())
        for rank in (a, b):
            assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)
