"""Fused ops on sharded stages, on real processes: loss and gradients of one device in float64."""

from __future__ import annotations

import pytest

from graphaccel.kernels.registry import enabled
from tests.gloo.plans.test_axes import check, pins_for, run_axes
from tests.support.pool import Pool

CASES = [
    ("gpt", "tensor2"),
    ("gpt2", "tensor2-data2"),
    ("bert", "tensor2-pipeline2"),
    ("llama", "tensor2-context2"),
    ("t5", "tensor2-pipeline2"),
    ("vit", "tensor2"),
    ("mixtral", "expert2"),
]
WANTED = {"gpt2": "bias_gelu_tanh", "llama": "swiglu", "t5": "add_rms_norm", "mixtral": "rotary"}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_one_fused_step_is_that_of_one_device(pool: Pool, name: str, plan: str) -> None:
    """With all that "auto" places on GPUs: here their references run."""
    world, pins = pins_for(name, plan)
    pins |= {"fusions": enabled("auto", "cuda")}
    got = pool.run(world, run_axes, name, pins, world)
    check(name, got)
    placed = {f for rank in got for f in rank["fused"]}
    wanted = {
        "gpt2": "bias_gelu_tanh",
        "llama": "swiglu",
        "t5": "add_rms_norm",
        "mixtral": "rotary",
    }
    assert wanted.get(name, "bias_gelu") in placed, placed
