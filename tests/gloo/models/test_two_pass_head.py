"""Losses that are no sum over the batch, on several processes: eager's losses and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

import graphaccel
from tests.support.captures import captures_of
from tests.support.mixing import LOSSES, Model, batch
from tests.support.parity import least_peaks, tensors_alive
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PIPELINE = {"data": 1, "pipeline": 2, "microbatches": 4}
BOTH = {"data": 2, "microbatches": 2}
TENSOR = {"data": 1, "tensor": 2, "microbatches": 2}
PLANS = [
    *((2, {"data": 2}, name) for name in ("infonce", "clip", "supervised_contrastive")),
    *((2, BOTH, name) for name in ("dice", "clip", "balance")),
    *((2, PIPELINE, name) for name in ("dice", "clip", "balance", "uncertainty")),
    *((4, BOTH | {"pipeline": 2}, name) for name in ("rmse", "supervised_contrastive")),
    *((2, BOTH | {"zero": level}, "clip") for level in (2, 3)),
    *((2, TENSOR, name) for name in ("clip", "balance")),
]
LARGE = [
    (1, {"microbatches": 4}),
    (2, {"data": 2}),
    (2, BOTH),
    (2, PIPELINE),
]


def train(model: Any, optimizer: Any) -> list[float]:
    """Losses of three steps."""
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def planned(name: str, pins: dict[str, Any]) -> dict[str, Any]:
    """What a rank sees of three steps under a plan."""
    torch.manual_seed(0)
    model = Model(LOSSES[name])
    model, optimizer = graphaccel.optimize(model, SGD(model.parameters(), lr=0.3), **pins)
    with captures_of(f"two passes {name}"):
        losses = train(model, optimizer)
    state = {k: v.clone() for k, v in graphaccel.full_state_dict(model).items()}
    return {"losses": losses, "state": state if torch.distributed.get_rank() == 0 else {}}


@pytest.mark.parametrize(("ranks", "pins", "name"), PLANS)
def test_it_trains_as_on_one_device(
    pool: Pool, ranks: int, pins: dict[str, Any], name: str
) -> None:
    torch.manual_seed(0)
    plain = Model(LOSSES[name])
    want = train(plain, SGD(plain.parameters(), lr=0.3))
    for found in pool.run(ranks, planned, name, pins):
        assert found["losses"] == pytest.approx(want, rel=1e-10)
        for key, value in found["state"].items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-9, atol=1e-11)


def peaks(name: str, pins: dict[str, Any]) -> tuple[int, int]:
    """Predicted and measured bytes of a step."""
    others = [tensor.untyped_storage() for tensor in tensors_alive()]
    torch.manual_seed(0)
    model = Model(LOSSES[name], width=64)
    model, optimizer = graphaccel.optimize(model, SGD(model.parameters(), lr=0.3), **pins)
    inputs = batch(512)
    with captures_of(f"two passes {name}"):
        model(*inputs).backward()
    optimizer.step()
    predicted = model.graphaccel.predicted_pass_bytes
    return predicted, least_peaks(model, inputs, None, others, (predicted, 0))[0][0]


@pytest.mark.parametrize(("ranks", "pins"), LARGE)
@pytest.mark.parametrize("name", ["clip", "supervised_contrastive"])
def test_memory_is_as_predicted(pool: Pool, ranks: int, pins: dict[str, Any], name: str) -> None:
    for predicted, measured in pool.run(ranks, peaks, name, pins):
        assert predicted == pytest.approx(measured, rel=0.02)
