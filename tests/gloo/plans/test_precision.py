"""Gradients in bf16 are as good as eager's in bf16: under autocast, and with cast parameters."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.parity import run_plan
from tests.support.pool import Pool
from tests.support.zoo import ZOO, Batch, call, double, loss_of

pytestmark = pytest.mark.multiprocess
PLANS = {
    "data": {"data": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2, "schedule": "1f1b", "interleave": 1},
    "tensor": {"tensor": 2, "recompute": "all"},
    "zero": {"data": 2, "zero": 3},
    "once": {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step", "microbatches": 2},
    "replicated": {"data": 4, "zero": 3, "shard_size": 2},
    "replicated once": {
        "data": 4, "zero": 3, "shard_size": 2, "microbatches": 2,
        "reshard_after_forward": "once_per_step",
    },
}  # fmt: skip
SMALL = 1e-3  # of the largest gradient: below, rounding is all there is
CASES = [
    ("gpt", "data", "bf16"),
    ("gpt", "tensor", "bf16-params"),
    ("llama", "tensor", "bf16"),
    ("llama", "pipeline", "bf16-params"),
    ("t5", "zero", "bf16-params"),
    ("llama", "zero", "bf16-params"),
    ("llama", "once", "bf16-params"),
    ("gpt", "once", "bf16"),
    ("llama", "replicated", "bf16-params"),
    ("gpt", "replicated once", "bf16"),
    ("t5", "tensor", "bf16"),
    ("bert", "data", "bf16-params"),
    ("vit", "data", "bf16-params"),
]


def _gradients(model: nn.Module, batch: Batch, loss: Tensor) -> dict[str, Tensor]:
    named = list(model.named_parameters())
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return {n: g.double() for (n, _), g in zip(named, found, strict=True) if g is not None}


@cache
def _eager(name: str, precision: str) -> dict[str, Tensor]:
    """Gradients of eager mode: in float64, under autocast, or with parameters in bf16."""
    model, batch, loss_fn = ZOO[name].build()
    if precision == "float64":
        model, batch = double(model, batch)
        return _gradients(model, batch, loss_of(call(model, batch), batch, loss_fn))
    if precision == "bf16":
        with torch.autocast("cpu", torch.bfloat16):
            return _gradients(model, batch, loss_of(call(model, batch), batch, loss_fn))
    low = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
    batch = _map(batch, lambda x: x.to(torch.bfloat16) if x.is_floating_point() else x)
    given: dict[str, Any] = {"args": (), "kwargs": batch} if isinstance(batch, dict) else {
        "args": tuple(batch), "kwargs": {}}  # fmt: skip
    output = torch.func.functional_call(model, low, **given)
    return _gradients(model, batch, loss_of(output, batch, loss_fn))


def _map(batch: Batch, change: Any) -> Batch:
    if isinstance(batch, dict):
        return {k: change(v) for k, v in batch.items()}
    return tuple(map(change, batch))


def _apart(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Relative error, the median over the gradients that are more than rounding."""
    most = max(float(g.abs().max()) for g in truth.values())
    apart = [
        float((found[n].double() - g).norm() / g.norm())
        for n, g in truth.items()
        if float(g.abs().max()) > SMALL * most
    ]
    return statistics.median(apart)


@pytest.mark.parametrize(("model", "plan", "precision"), CASES)
def test_gradients_are_as_good_as_eager_ones(
    pool: Pool, model: str, plan: str, precision: str
) -> None:
    pins = PLANS[plan] | {"precision": precision}
    world = prod(PLANS[plan].get(axis, 1) for axis in ("data", "pipeline", "tensor"))
    got = pool.run(world, run_plan, model, "float32", pins, 1)
    ours = {n: g for rank in got for n, g in rank["grads"].items()}
    truth, eager = _eager(model, "float64"), _eager(model, precision)
    assert set(ours) >= set(truth)
    error, theirs = _apart(ours, truth), _apart(eager, truth)
    assert 1e-4 < theirs < 0.2  # eager rounds, and not beyond recognition
    assert 1e-4 < error < 1.25 * theirs
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)


def test_with_cast_parameters_nothing_of_a_block_is_kept_in_float32(pool: Pool) -> None:
    """But for statistics: what waits for the backward takes about half of what autocast keeps."""
    kept = {
        precision: pool.run(
            2, run_plan, "llama", "float32", PLANS["pipeline"] | {"precision": precision}, 1
        )[0]["peak_predicted"]
        for precision in ("fp32", "bf16", "bf16-params")
    }
    assert kept["bf16-params"] < kept["bf16"] < kept["fp32"]
