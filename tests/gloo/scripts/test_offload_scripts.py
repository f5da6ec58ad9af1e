"""What scripts do besides stepping, where optimizer state is on the host, and parameters may be.

Each job runs the same training on one process in eager mode and under the plan, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel.kernels.host_copy import to_device, to_host
from tests.gloo.scripts.test_numbers import Loud
from tests.gloo.scripts.test_semantics import furthest, gpt, groups, tokens
from tests.gloo.scripts.test_zero_scripts import trained
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.small import small_batch

pytestmark = pytest.mark.multiprocess

HOST, ALL_OF_IT = {"offload": "optimizer"}, {"offload": "optimizer+parameters"}
PLANS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"data": 1, **HOST}),
    (2, {"data": 2, "zero": 1, **HOST}),
    (2, {"data": 2, "zero": 3, **HOST}),
    (2, {"pipeline": 2, "microbatches": 4, **HOST}),
    (1, {"data": 1, **ALL_OF_IT}),
    (2, {"data": 2, "zero": 3, **ALL_OF_IT}),
    (2, {"pipeline": 2, "microbatches": 4, **ALL_OF_IT}),
)
IDS = ("one", "zero1", "zero3", "pipeline2", "one-all", "zero3-all", "pipeline2-all")
FEW = pytest.mark.parametrize(("world", "pins"), [PLANS[i] for i in (0, 1, 4)],
                              ids=[IDS[i] for i in (0, 1, 4)])  # fmt: skip
EVERY = pytest.mark.parametrize(("world", "pins"), PLANS, ids=IDS)


@EVERY
def test_clipping_groups_schedules_and_accumulation(
    pool: Pool, world: int, pins: dict[str, Any]
) -> None:
    """Twenty steps; the optimizer's groups and the keys of its state are the script's."""
    for states, gradients, norms in pool.run(world, trained, world, pins):
        assert states <= 1e-9
        assert gradients <= 1e-12
        assert norms <= 1e-10


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    # its state exists before the plan; from 0 it would divide rounding by rounding
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
}


@captures_of("scripts")
def _optimizers(world: int, pins: Mapping[str, Any]) -> dict[str, tuple[float, int, bool]]:
    """By kind: the largest difference after three steps, how many tensors rest on the host, and
    whether parameters are among them as the plan says."""
    found = {}
    for name, (kind, settings) in KINDS.items():
        plain = gpt()
        planned = copy.deepcopy(plain)
        first, second = (kind(groups(m), **settings) for m in (plain, planned))
        given = {"pipeline": 1, "microbatches": 1, "recompute": "none", **pins}
        graphaccel.optimize(planned, second, devices=world, **given)
        for model, optimizer in ((plain, first), (planned, second)):
            for step in range(3):
                model(**tokens(seed=step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if world == 1:
                    for parameter in model.parameters():  # unseen by version counters
                        parameter.data.clamp_(-0.2, 0.2)
        held = planned.graphaccel.host_tensors()
        apart = {t.untyped_storage().data_ptr() for t in held}
        own = {p.untyped_storage().data_ptr() for p in planned.parameters()}
        state = furthest(plain.state_dict(), graphaccel.full_state_dict(planned))
        all_of_it = "parameters" in pins["offload"]  # then they are among what rests there
        found[name] = (state, len(held), own <= apart if all_of_it else not apart & own)
    return found


@FEW
def test_other_optimizers(pool: Pool, world: int, pins: dict[str, Any]) -> None:
    for found in pool.run(world, _optimizers, world, pins):
        for name, (apart, count, separate) in found.items():
            assert apart <= (1e-12 if world == 1 else 1e-9), name  # two ranks add in other orders
            assert count > 0, name
            assert separate, name


@captures_of("scripts")
def _clipped(world: int, pins: Mapping[str, Any]) -> tuple[float, float]:
    """`clip_norm=` for an optimizer that is fused and one that is not, against clip_grad_norm_."""
    worst, apart = 0.0, 0.0
    for kind in (torch.optim.AdamW, torch.optim.RAdam):
        plain = gpt()
        planned = copy.deepcopy(plain)
        first, second = (kind(groups(m), lr=1e-2) for m in (plain, planned))
        given = {"pipeline": 1, "microbatches": 1, "recompute": "none", **pins}
        graphaccel.optimize(planned, second, devices=world, clip_norm=0.05, **given)
        for step in range(3):
            plain(**tokens(seed=step)).backward()
            planned(**tokens(seed=step)).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            apart = max(apart, abs(float(norm) - float(planned.graphaccel.grad_norm)))
        worst = max(worst, furthest(plain.state_dict(), graphaccel.full_state_dict(planned)))
    return worst, apart


@EVERY
def test_the_step_clips_on_the_host(pool: Pool, world: int, pins: dict[str, Any]) -> None:
    for states, norms in pool.run(world, _clipped, world, pins):
        assert states <= 1e-10
        assert norms <= 1e-10


@captures_of("scripts")
def _overflowed(world: int, pins: Mapping[str, Any]) -> tuple[list[bool], list[float]]:
    torch.manual_seed(7)
    model = Loud()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x, _ = small_batch()
    graphaccel.optimize(model, optimizer, devices=world, precision="fp16", **pins)
    moved, factors = [], []
    for _ in range(12):
        model(x).backward()
        before = graphaccel.full_state_dict(model)
        optimizer.step()
        optimizer.zero_grad()
        after = graphaccel.full_state_dict(model)
        moved.append(any(not torch.equal(after[n], before[n]) for n in before))
        factors.append(model.graphaccel.loss_scale)
    return moved, factors


@pytest.mark.parametrize("pins", [{"zero": 1, **HOST}, {"zero": 3, **ALL_OF_IT}], ids=str)
def test_an_overflow_skips_the_step_on_the_host(pool: Pool, pins: dict[str, Any]) -> None:
    first, second = pool.run(2, _overflowed, 2, {"data": 2, "pipeline": 1, **pins})
    assert first == second
    moved, factors = first
    assert 0 < moved.index(True) < 12
    assert all(moved[moved.index(True) :])
    assert factors[moved.index(True)] < 65536.0


@captures_of("scripts")
def _resumed(pins: Mapping[str, Any], later: Mapping[str, Any]) -> tuple[float, float]:
    """Saved with state on the host, loaded by another plan and by the plain model's optimizer."""

    def made(wanted: Mapping[str, Any] | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = gpt()
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
        if wanted is not None:
            graphaccel.optimize(model, optimizer, devices=1, example_batch=tokens(), **wanted)
        return model, optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        model(**tokens(seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made(pins)
    for seed in range(3):
        step(model, optimizer, seed)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer, 9)
    apart = []
    for wanted in (later, None):
        other, its = made(wanted)
        other.load_state_dict(saved[0])
        its.load_state_dict(copy.deepcopy(saved[1]))  # it steps in what it is given
        step(other, its, 9)
        apart.append(furthest(dict(model.named_parameters()), dict(other.named_parameters())))
    return apart[0], apart[1]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("optimizer", "none"),
        ("none", "optimizer"),
        ("optimizer+parameters", "none"),
        ("optimizer", "optimizer+parameters"),
    ],
)
def test_state_dicts_are_those_of_the_plain_optimizer(pool: Pool, saved: str, loaded: str) -> None:
    for under_plan, plain in pool.run(1, _resumed, {"offload": saved}, {"offload": loaded}):
        assert under_plan <= 1e-12
        assert plain <= 1e-12


@captures_of("scripts")
def _closed() -> str:
    model = gpt()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.graphaccel_elementwise = True
    graphaccel.optimize(model, optimizer, devices=1, example_batch=tokens(), **HOST)
    try:
        optimizer.step(lambda: 0.0)
    except graphaccel.GraphAccelError as error:
        return str(error)
    return ""


def test_a_closure_that_is_called_several_times_is_refused(pool: Pool) -> None:
    (text,) = pool.run(1, _closed)
    assert text.splitlines()[0] == (
        "error[GA407]: optimizer.step(closure) where optimizer state is on the host"
    )


def test_copies_have_memory_of_their_own() -> None:
    x = torch.randn(4, 6, dtype=torch.float64).t()
    there = to_host(x)
    back = to_device(there)
    assert torch.equal(x, there)
    assert torch.equal(x, back)
    assert there.is_contiguous()
    assert len({t.untyped_storage().data_ptr() for t in (x, there, back)}) == 3
