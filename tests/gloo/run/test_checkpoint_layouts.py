"""Checkpoints that move: saved under one plan, loaded under another and into the plain model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import graphaccel
from graphaccel.ir.program import Sharded
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.mesh import build_mesh
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.sharded import ShardTensor
from tests.gloo.scripts.test_semantics import gpt, groups, tokens
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"data": 2, "zero": 3}),
    "zero1": (2, {"data": 2, "zero": 1}),
    "zero2 on four": (4, {"data": 4, "zero": 2}),
    "zero3 in a pipeline": (4, {"data": 2, "zero": 3, "pipeline": 2, "microbatches": 2}),
    "zero3 around a pipeline": (
        4,
        {"data": 2, "zero": 3, "pipeline": 2, "microbatches": 2, "order": ("data", "pipeline")},
    ),
    "tensor around data": (4, {"data": 2, "tensor": 2, "zero": 3, "order": ("tensor", "data")}),
    "tensor and data": (4, {"data": 2, "tensor": 2, "zero": 3}),
    "pipeline of four": (4, {"pipeline": 4, "microbatches": 4}),
    "zero3 replicated": (4, {"data": 4, "zero": 3, "shard_size": 2}),
    "zero1 replicated": (4, {"data": 4, "zero": 1, "shard_size": 2}),
    "zero2 replicated, tensor": (8, {"data": 4, "zero": 2, "shard_size": 2, "tensor": 2}),
    "gathered once": (
        2,
        {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step", "microbatches": 2},
    ),
    "zero1 on the host": (2, {"data": 2, "zero": 1, "offload": "optimizer"}),
    "pipeline on the host": (2, {"pipeline": 2, "microbatches": 2, "offload": "optimizer"}),
}
# Every plan saves once and loads once; the last row's checkpoint goes into the plain model too.
WAYS = [
    ("zero3", "zero3 in a pipeline"),
    ("zero3 in a pipeline", "zero2 on four"),
    ("zero2 on four", "tensor and data"),
    ("tensor and data", "pipeline of four"),
    ("pipeline of four", "zero1"),
    ("zero1", "gathered once"),
    ("gathered once", "zero3"),
    ("zero3", "zero1 on the host"),
    ("zero1 on the host", "pipeline on the host"),
    ("pipeline on the host", "zero3"),
    ("zero3", "zero3 replicated"),
    ("zero3 replicated", "zero3"),
    ("zero1 replicated", "zero2 replicated, tensor"),
    ("zero2 replicated, tensor", "zero1 replicated"),
    ("zero3 in a pipeline", "zero3 around a pipeline"),
    ("zero3 around a pipeline", "tensor around data"),
    ("tensor around data", "zero3"),
]


@pytest.fixture
def folder() -> Iterator[str]:
    """Where a checkpoint lies."""
    path = tempfile.mkdtemp()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _planned(world: int, pins: Mapping[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt(4)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    wanted = {"pipeline": 1, "microbatches": 1, "recompute": "none", **pins}
    if wanted["pipeline"] > 1:
        wanted["interleave"] = 1
    graphaccel.optimize(model, optimizer, devices=world, example_batch=tokens(), **wanted)
    return model, optimizer


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and the optimizer state of this rank's parameters, in full."""
    full = {f"model.{k}": v for k, v in graphaccel.full_state_dict(model).items()}
    names = [n for n, p in model.named_parameters()]
    found = get_optimizer_state_dict(model, optimizer)["state"]
    for name in names:
        for key, value in found.get(name, {}).items():
            if isinstance(value, ShardTensor):
                value = value.whole()
            elif isinstance(value, DTensor):
                value = value.full_tensor()
            full[f"{name}.{key}"] = value.clone()
    return full


@captures_of("scripts")
def _save(world: int, pins: Mapping[str, Any], folder: str) -> tuple[dict[str, Tensor], float]:
    model, optimizer = _planned(world, pins)
    for step in range(3):
        model(**tokens(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    graphaccel.save(folder, model, optimizer, step=3)
    full = full_state(model, optimizer)
    return full, model(**tokens(seed=9)).item()


@captures_of("scripts")
def _load(world: int, pins: Mapping[str, Any], folder: str) -> tuple[dict[str, Tensor], float]:
    model, optimizer = _planned(world, pins)
    assert graphaccel.load(folder, model, optimizer).step == 3
    full = full_state(model, optimizer)
    return full, model(**tokens(seed=9)).item()


def _load_plain(folder: str) -> tuple[dict[str, Tensor], float]:
    model = gpt(4)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    assert graphaccel.load(folder, model, optimizer).step == 3
    return full_state(model, optimizer), model(**tokens(seed=9)).item()


@pytest.mark.parametrize(("saved", "loaded"), WAYS)
def test_a_checkpoint_moves(pool: Pool, folder: str, saved: str, loaded: str) -> None:
    before = pool.run(PLANS[saved][0], _save, *PLANS[saved], folder)
    after = pool.run(PLANS[loaded][0], _load, *PLANS[loaded], folder)
    plain, loss = _load_plain(folder)
    assert {k for full, _ in before for k in full} == set(plain)
    assert {k for full, _ in after for k in full} == set(plain)
    for full, next_loss in (*before, *after):
        for name, value in full.items():
            assert torch.equal(value, plain[name]), name
        assert next_loss == pytest.approx(loss, rel=1e-14)


@captures_of("scripts")
def _sections(folder: str) -> tuple[bool, bool]:
    """A fused weight: three sections, each cut over two ranks; saved, loaded whole and again cut
    in another way."""
    mesh = build_mesh(Plan(devices=2, data=2), (), torch.device("cpu"), timedelta(seconds=60))
    whole = torch.arange(48.0).view(12, 4)
    fused = ShardLayout(whole.shape, (Sharded("data", 0, outer=3),), mesh)
    made = ShardTensor(fused.own(whole).clone(), fused)
    dcp.save({"w": made}, checkpoint_id=folder)
    columns = ShardLayout(whole.shape, (Sharded("data", 1),), mesh)
    other = ShardTensor(torch.zeros(12, 2), columns)
    again = ShardTensor(torch.zeros(6, 4), fused)
    dcp.load({"w": other}, checkpoint_id=folder)
    dcp.load({"w": again}, checkpoint_id=folder)
    dist.barrier()
    right = torch.equal(other.whole(), whole) and torch.equal(again.whole(), whole)
    return right, torch.equal(made.whole(), whole)


def test_fused_weights_are_saved_section_by_section(pool: Pool, folder: str) -> None:
    assert pool.run(2, _sections, folder) == [(True, True)] * 2
    plain = {"w": torch.zeros(12, 4)}
    dcp.load(plain, checkpoint_id=folder, no_dist=True)
    assert torch.equal(plain["w"], torch.arange(48.0).view(12, 4))
    assert Path(folder).exists()
