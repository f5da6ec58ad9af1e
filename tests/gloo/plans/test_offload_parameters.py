"""Parameters on the host: the step of one device, with two blocks of them on the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel.kernels.host_copy import ahead, on_host
from tests.gloo.plans.test_offload import PIPELINE, check_twenty, reference_of, run_away
from tests.gloo.scripts.test_semantics import furthest, gpt, groups, tokens
from tests.support.captures import captures_of
from tests.support.parity import compare
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

AWAY = "optimizer+parameters"
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {"data": 1, "microbatches": 1}),
    "one device, microbatches": (1, {"data": 1, "microbatches": 4}),
    "zero3": (2, {"data": 2, "zero": 3, "microbatches": 1}),
    "zero3-shards": (2, {"data": 2, "zero": 3, "microbatches": 2, "accumulation": "shards"}),
    "tensor2": (2, {"data": 1, "tensor": 2, "microbatches": 1}),
    "context2": (2, {"data": 1, "context": 2, "microbatches": 1}),
    "pipeline": (2, PIPELINE),
    "interleaved": (2, {**PIPELINE, "interleave": 2}),
    "recomputed": (1, {"data": 1, "microbatches": 2, "recompute": "all"}),
    "zero3-replicated": (4, {"data": 4, "zero": 3, "shard_size": 2, "microbatches": 1}),
    "zero3-tensor2": (4, {"data": 2, "zero": 3, "tensor": 2, "microbatches": 1}),
    "zero3-pipeline2": (4, {**PIPELINE, "data": 2, "zero": 3, "microbatches": 2}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_twenty_steps_are_those_of_one_device(pool: Pool, plan: str) -> None:
    check_twenty(pool, PLANS[plan], AWAY)


@pytest.mark.parametrize(
    ("model", "plan"),
    [("resnet", "one device"), ("t5", "pipeline"), ("t5", "zero3"), ("mixtral", "zero3")],
)
def test_other_models(pool: Pool, model: str, plan: str) -> None:
    got = run_away(pool, model, PLANS[plan], 3, AWAY)
    compare(reference_of(model, 3), got).check(1e-9, 1e-10)


def test_with_activations_too(pool: Pool) -> None:
    got = run_away(pool, "gpt", PLANS["one device, microbatches"], 3, f"{AWAY}+activations")
    compare(reference_of("gpt", 3), got).check(1e-9, 1e-10)


def test_the_device_has_the_parameters_no_more(pool: Pool) -> None:
    """What lay there whole is there a block or two at a time; the host has them once either way."""
    kept = run_away(pool, "gpt", PLANS["one device"], 2, "optimizer")
    away = run_away(pool, "gpt", PLANS["one device"], 2, AWAY)
    for before, after in zip(kept, away, strict=True):
        assert after["host_measured"] == before["host_measured"]
        assert after["peak_measured"] < before["peak_measured"]


@captures_of("scripts")
def _replaced(world: int, pins: Mapping[str, Any]) -> tuple[float, float]:
    """Values that a script puts where parameters were, and evaluation between steps: how far
    parameters and losses are from those of one device."""
    plain = gpt()
    planned = copy.deepcopy(plain)
    first, second = (torch.optim.AdamW(groups(m), lr=1e-2) for m in (plain, planned))
    given = {"pipeline": 1, "microbatches": 1, "recompute": "none", **pins}
    graphaccel.optimize(planned, second, devices=world, **given)
    evaluated = []
    for step in range(4):
        both = []
        for model, optimizer in ((plain, first), (planned, second)):
            model(**tokens(seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.eval()
                both.append(float(model(**tokens(seed=9))))
                model.train()
                if world == 1 and step == 1:
                    for parameter in model.parameters():
                        parameter.data = parameter.data * 0.9
                else:
                    for parameter in model.parameters():
                        parameter.mul_(0.95)
        evaluated.append(abs(both[0] - both[1]))
    return furthest(plain.state_dict(), graphaccel.full_state_dict(planned)), max(evaluated)


@pytest.mark.parametrize(
    ("world", "pins"),
    [(1, {"data": 1}), (2, {"data": 2, "zero": 3}), (2, {"data": 1, "tensor": 2})],
    ids=["one", "zero3", "tensor2"],
)
def test_scripts_read_and_write_them(pool: Pool, world: int, pins: dict[str, Any]) -> None:
    for states, evaluated in pool.run(world, _replaced, world, {**pins, "offload": AWAY}):
        assert states <= 1e-10
        assert evaluated <= 1e-10


@captures_of("scripts")
def _outside(world: int, pins: Mapping[str, Any]) -> float:
    """With the loss computed by the script."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).double()
    planned = copy.deepcopy(plain)
    first, second = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, planned))
    graphaccel.optimize(planned, second, devices=world, loss_fn="outside", **pins)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()
        for model, optimizer in ((plain, first), (planned, second)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return furthest(plain.state_dict(), graphaccel.full_state_dict(planned))


def test_a_loss_outside_of_the_graph(pool: Pool) -> None:
    for apart in pool.run(1, _outside, 1, {"offload": AWAY}):
        assert apart <= 1e-12


def test_copies_keep_strides_and_have_memory_of_their_own() -> None:
    x = torch.randn(4, 6, dtype=torch.float64).t()
    assert on_host(x, torch.device("cpu")) is x
    there = ahead(x)
    here = torch.ops.graphaccel.arrived(there)
    assert torch.equal(here, x)
    assert there.stride() == here.stride() == x.stride()
    assert there.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert here.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
