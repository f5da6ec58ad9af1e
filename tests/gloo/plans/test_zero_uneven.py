"""ZeRO over ranks that divide no dim: shards with padding, the step of one device."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import graphaccel
from graphaccel.runtime.parameters.sharded import ShardTensor
from tests.gloo.plans.test_uneven import train
from tests.support.captures import captures_of
from tests.support.gpt import GPT
from tests.support.parity import least_peaks, stored, tensors_alive
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

BIAS = "blocks.0.up.bias"  # [100]: 34, 34 and 32 of three ranks
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (3, {"zero": 1}),
    "zero2": (3, {"zero": 2, "microbatches": 2}),
    "zero2-shards": (3, {"zero": 2, "microbatches": 2, "accumulation": "shards"}),
    "zero3": (3, {"zero": 3}),
    "zero3-recomputed": (3, {"zero": 3, "recompute": "all"}),
    "zero3-whole": (3, {"zero": 3, "microbatches": 2}),
    "zero3-shards": (3, {"zero": 3, "microbatches": 2, "accumulation": "shards"}),
    "zero3-kept": (3, {"zero": 3, "reshard_after_forward": "never"}),
    "zero3-held": (3, {"zero": 3, "microbatches": 2, "reshard_after_forward": "once_per_step"}),
    "zero3-host": (3, {"zero": 3, "offload": "optimizer"}),
    "zero1-host": (3, {"zero": 1, "offload": "optimizer"}),
    "zero3-part": (6, {"zero": 3, "shard_size": 3}),
    "zero3-pipeline": (6, {"zero": 3, "pipeline": 2, "microbatches": 2}),
    "zero3-tensor": (6, {"zero": 3, "tensor": 2}),
    "zero1-tensor": (6, {"zero": 1, "tensor": 2}),
}


class Scaled(GPT):
    """With a parameter that three ranks can not share."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels) * self.scale.mean()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Scaled(vocabulary=97, layers=2, width=25, heads=5, deviation=0.2).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


@captures_of("uneven shards")
def run(world: int, pins: dict[str, Any], folder: str) -> dict[str, Any]:
    model, optimizer = made()
    ids = torch.zeros(12, 8, dtype=torch.long)
    pins = {"pipeline": 1, "microbatches": 1, "recompute": "none", **pins}
    model, optimizer = graphaccel.optimize(
        model, optimizer, example_batch=(ids, ids), devices=world, **pins
    )
    seen = train(model, optimizer, 12)
    with torch.no_grad():
        evaluated = model(ids, ids).item()
    state = graphaccel.full_state_dict(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    found = get_optimizer_state_dict(model, optimizer)["state"]
    moments = found[BIAS]["exp_avg"] if BIAS in found else None  # of another stage
    bias = dict(model.named_parameters())[BIAS]
    own = optimizer.state[bias].get("exp_avg") if bias in optimizer.state else None
    return {
        "seen": seen,
        "evaluated": evaluated,
        "state": state,
        "bias": tuple(bias.local.shape) if isinstance(bias, ShardTensor) else tuple(bias.shape),
        "own": None if own is None else tuple(own.shape),
        "moments": None if moments is None else tuple(moments.shape),
        "behind": None if own is None else own[32:].abs().sum().item(),
        "whole": dict(model.graphaccel.program.unsharded),
    }


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_that_of_one_device(pool: Pool, plan: str) -> None:
    model, optimizer = made()
    seen = train(model, optimizer, 12)
    ids = torch.zeros(12, 8, dtype=torch.long)
    evaluated = model(ids, ids).item()
    wanted: dict[str, Tensor] = model.state_dict()
    world, pins = PLANS[plan]
    with tempfile.TemporaryDirectory() as folder:
        got = pool.run(world, run, world, pins, folder)
        saved = {"model": {key: torch.zeros_like(value) for key, value in wanted.items()}}
        dcp.load(saved, checkpoint_id=folder, no_dist=True)
    for rank in got:
        assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-10)
        for one, other in zip(rank["seen"], seen, strict=True):
            assert one == pytest.approx(other, rel=1e-10)
        for key, value in wanted.items():
            assert torch.allclose(rank["state"][key], value, rtol=1e-9, atol=1e-12), key
            assert torch.equal(saved["model"][key], rank["state"][key]), key
    if world == 3:
        assert [rank["behind"] == 0.0 for rank in got] == [False, False, True]
    if "tensor" not in pins:
        assert {rank["moments"] for rank in got} <= {(100,), None}
        assert {rank["own"] for rank in got} <= {(34,), None}
        assert {rank["bias"] for rank in got} <= (
            {(34,), (100,)} if pins["zero"] == 3 else {(100,)}
        )
        assert all(rank["whole"] == {"scale": "no dim of [4] can be shared by 3"} for rank in got)


@captures_of("uneven shards")
def _bytes(zero: int, accumulation: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on this rank, as measured and as predicted."""
    others = [tensor.untyped_storage() for tensor in tensors_alive()]
    torch.manual_seed(3)
    model = GPT(vocabulary=97, layers=2, width=25, heads=5)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(12, 8, dtype=torch.long)
    model, optimizer = graphaccel.optimize(
        model, optimizer, example_batch=(ids, ids), devices=3, data=3, pipeline=1, zero=zero,
        microbatches=2, recompute="none", **({"accumulation": accumulation} if zero > 1 else {}),
    )  # fmt: skip
    model(ids, ids).backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    measured = {"parameter": stored(model.parameters()), "optimizer": stored(state)}
    optimizer.zero_grad()
    del state
    (measured["peak"], _), _ = least_peaks(model, (ids, ids), None, others)
    (memory,) = model.graphaccel.plan.prediction.memory
    predicted = {"parameter": memory.parameter, "optimizer": memory.optimizer}
    predicted["peak"] = model.graphaccel.predicted_pass_bytes
    return measured, predicted


@pytest.mark.parametrize(
    ("zero", "accumulation"), [(1, ""), (2, "whole"), (2, "shards"), (3, "whole"), (3, "shards")]
)
def test_what_is_padded_is_counted(pool: Pool, zero: int, accumulation: str) -> None:
    for measured, predicted in pool.run(3, _bytes, zero, accumulation):
        assert predicted["parameter"] == measured["parameter"]
        assert predicted["optimizer"] == measured["optimizer"]
        assert predicted["peak"] == pytest.approx(measured["peak"], rel=0.02)
