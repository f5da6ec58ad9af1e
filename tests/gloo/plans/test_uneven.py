"""A vocabulary that no axis divides: training, clipping and checkpoints as on one device."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import graphaccel
from graphaccel.runtime.parameters.sharded import ShardTensor
from tests.support.captures import captures_of
from tests.support.gpt import GPT
from tests.support.pool import Pool

TOKEN = "token.weight"


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = GPT(vocabulary=97, layers=1, width=16, deviation=0.2).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 4
) -> list[tuple[float, float]]:
    """Losses and norms of gradients of three steps."""
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(3):
        ids = torch.randint(0, 97, (batch, 8), generator=generator)
        loss = model(ids, ids.masked_fill(ids % 5 == 0, -100))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@captures_of("uneven")
def run(pins: dict[str, Any], folder: str) -> dict[str, Any]:
    model, optimizer = made()
    ids = torch.zeros(4, 8, dtype=torch.long)
    model, optimizer = graphaccel.optimize(model, optimizer, example_batch=(ids, ids), **pins)
    seen = train(model, optimizer)
    state = graphaccel.full_state_dict(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    moments = get_optimizer_state_dict(model, optimizer)["state"][TOKEN]["exp_avg"]
    token = dict(model.named_parameters())[TOKEN]
    assert isinstance(token, ShardTensor)
    local = tuple(token.local.shape)
    dist.barrier()
    with torch.no_grad():
        token.fill_(1.0)  # by the user: not what lies behind the end
    return {
        "seen": seen,
        "state": state,
        "local": local,
        "moments": tuple(moments.shape),
        "rows": token.local[:, 0].sum().item(),
        "norm": token.norm().item(),
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("pins", "local"),
    [
        ({"tensor": 2}, (49, 16)),
        ({"tensor": 2, "data": 2, "zero": 3}, (49, 8)),
    ],
)
def test_an_odd_vocabulary(pool: Pool, pins: dict[str, Any], local: tuple[int, int]) -> None:
    model, optimizer = made()
    seen = train(model, optimizer)
    wanted: dict[str, Tensor] = model.state_dict()
    pins = {**pins, "placements": {TOKEN: graphaccel.shard(0, "tensor")}, "recompute": "none"}
    with tempfile.TemporaryDirectory() as folder:
        got = pool.run(2 * pins.get("data", 1), run, {"microbatches": 1, **pins}, folder)
        saved = {"model": {key: torch.zeros_like(value) for key, value in wanted.items()}}
        dcp.load(saved, checkpoint_id=folder, no_dist=True)
    for rank in got:
        assert rank["local"] == local
        assert rank["moments"] == (97, 16)
        for one, other in zip(rank["seen"], seen, strict=True):
            assert one == pytest.approx(other, rel=1e-10)
        for key, value in wanted.items():
            assert torch.allclose(rank["state"][key], value, rtol=1e-9, atol=1e-12), key
            assert torch.equal(saved["model"][key], rank["state"][key]), key
        assert rank["rows"] in (49.0, 48.0)
        assert rank["norm"] == pytest.approx((97 * 16) ** 0.5)
    assert {rank["rows"] for rank in got} == {49.0, 48.0}
