"""Recorded steps of several ranks on a recorder as strict as CUDA's: bit for bit the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphaccel.dispatch import prepare
from graphaccel.runtime.cuda_graphs import WARM
from tests.support.parity import run_plan
from tests.support.pool import Pool
from tests.support.recorder import PoolRecorder

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": 2, "interleave": 1, "schedule": "1f1b", "microbatches": 4},
    "weights apart": {"pipeline": 2, "interleave": 1, "schedule": "zero_bubble", "microbatches": 4},
    "interleaved": {
        "pipeline": 2, "interleave": 2, "schedule": "interleaved", "microbatches": 2,
        "recompute": "all",
    },
}  # fmt: skip


def run_recorded(*given: Any) -> tuple[dict[str, Any], list[int], int]:
    """`run_plan` with recordings, how often each was replayed, and what the pool holds behind."""
    recorder = PoolRecorder(1 << 25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "recorder_for", lambda device: recorder)
        found = run_plan(*given)
    return found, [r.replays for r in recorder.made], len(recorder.arena.taken)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, gradients and optimizer state of a run, bit for bit."""
    assert found["losses"] == expected["losses"]
    for kind in ("grads", "state"):
        assert found[kind].keys() == expected[kind].keys()
        assert all(torch.equal(v, expected[kind][n]) for n, v in found[kind].items())


COLLECTIVES: dict[str, dict[str, Any]] = {
    "data": {"data": 2, "microbatches": 2},
    "data, one microbatch": {"data": 2, "microbatches": 1},
    "zero 1": {"data": 2, "microbatches": 2, "zero": 1},
    "zero 2, shards": {"data": 2, "microbatches": 2, "zero": 2, "accumulation": "shards"},
    "zero 3": {
        "data": 2,
        "microbatches": 2,
        "zero": 3,
        "reshard_after_forward": "always",
        "recompute": "all",
    },
    "zero 3, held": {
        "data": 2,
        "microbatches": 2,
        "zero": 3,
        "reshard_after_forward": "once_per_step",
    },
    "tensor": {"tensor": 2, "microbatches": 2},
    "context": {"context": 2, "microbatches": 1},
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_recorded_with_the_work_between_them(pool: Pool, name: str) -> None:
    """Gradients that are summed or cut to shards, parameters that are gathered, activations."""
    steps = WARM + 3
    pins = {"recompute": "none", **COLLECTIVES[name]}
    plain = pool.run(2, run_plan, "gpt", "float64", pins, steps)
    recorded = pool.run(2, run_recorded, "gpt", "float64", {**pins, "cuda_graphs": True}, steps)
    for expected, (found, replays, left) in zip(plain, recorded, strict=True):
        check_same(found, expected)
        actions = 2 * pins["microbatches"] + ("held" in name)
        since = 3 + found["steps_measured"]
        assert sum(replays) == since * actions, replays
        assert left == 0


@pytest.mark.parametrize("name", PLANS)
def test_a_recorded_pipeline_has_the_bits_of_one_that_is_not(pool: Pool, name: str) -> None:
    steps = WARM + 3
    pins = {"recompute": "none", **PLANS[name]}
    plain = pool.run(2, run_plan, "gpt", "float64", pins, steps)
    recorded = pool.run(2, run_recorded, "gpt", "float64", {**pins, "cuda_graphs": True}, steps)
    for expected, (found, replays, left) in zip(plain, recorded, strict=True):
        check_same(found, expected)
        actions = pins["microbatches"] * pins["interleave"] * (3 if "weights" in name else 2)
        since = 3 + found["steps_measured"]
        # A bucket that garbage still shows is not taken again at once: then there are two variants.
        assert len(replays) in (actions, 2 * actions)
        assert sum(replays) == since * actions, replays
        assert left == 0
