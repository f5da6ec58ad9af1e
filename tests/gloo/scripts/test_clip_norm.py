"""`clip_norm=` is `clip_grad_norm_` before the step, whatever is sharded, fused or left to torch.

Each job runs the same training on one process in eager mode and under the plan, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel.runtime.parameters.remote import RemoteTensor
from tests.gloo.scripts.test_numbers import Loud
from tests.gloo.scripts.test_semantics import furthest, gpt, groups, tokens
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.small import small_batch

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"data": 2}),
    "zero1": (2, {"data": 2, "zero": 1}),
    "zero2": (2, {"data": 2, "zero": 2, "microbatches": 2}),
    "zero3": (2, {"data": 2, "zero": 3}),
    "zero3-once": (
        2,
        {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step", "microbatches": 2},
    ),
    "tensor": (2, {"tensor": 2, "data": 1}),
    "pipeline": (2, {"pipeline": 2, "microbatches": 4}),
    "zero3-tensor": (4, {"data": 2, "zero": 3, "tensor": 2}),
    "zero1-replicated": (4, {"data": 4, "zero": 1, "shard_size": 2}),
    "zero2-replicated": (4, {"data": 4, "zero": 2, "shard_size": 2}),
    "zero3-replicated": (4, {"data": 4, "zero": 3, "shard_size": 2}),
}
BOUND = 0.05  # gradients of these models are larger


@captures_of("scripts")
def _trained(
    world: int, pins: Mapping[str, Any], fusions: str, kind: str
) -> tuple[float, float, list[float], tuple[str, ...]]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "rmsprop":  # whatever the plan, torch's own code steps it
            return torch.optim.RMSprop(groups(model), lr=1e-3)
        if kind == "sgd":
            return torch.optim.SGD(groups(model), lr=1.0, momentum=0.9)
        return torch.optim.AdamW(groups(model), lr=1e-2)

    plain, planned = gpt(), gpt()
    first, second = build(plain), build(planned)
    graphaccel.optimize(
        planned, second, devices=world, clip_norm=BOUND, fusions=fusions, **pins
    )  # fmt: skip
    apart, norms = 0.0, []
    for step in range(4):
        plain(**tokens(seed=step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), BOUND)))
        planned(**tokens(seed=step)).backward()
        second.step()
        apart = max(apart, abs(float(planned.graphaccel.grad_norm) / norms[-1] - 1))
        first.step()
        first.zero_grad()
        second.zero_grad()
    states = furthest(plain.state_dict(), graphaccel.full_state_dict(planned))
    return states, apart, norms, planned.graphaccel.left_to_torch


def check(found: tuple[float, float, list[float], tuple[str, ...]], left: bool) -> None:
    states, apart, norms, reasons = found
    assert min(norms) > 2 * BOUND
    assert apart <= 1e-10
    assert states <= 1e-9
    assert bool(reasons) is left


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize(("fusions", "kind"), [("off", "sgd"), ("auto", "sgd"), ("auto", "adamw")])
def test_steps_are_those_of_clipped_gradients(
    pool: Pool, plan: str, fusions: str, kind: str
) -> None:
    world, pins = PLANS[plan]
    for found in pool.run(world, _trained, world, pins, fusions, kind):
        check(found, left=False)


@pytest.mark.parametrize("plan", ["zero1", "pipeline"])
def test_what_is_left_to_torch_is_clipped_before(pool: Pool, plan: str) -> None:
    world, pins = PLANS[plan]
    for found in pool.run(world, _trained, world, pins, "auto", "rmsprop"):
        check(found, left=True)


@pytest.mark.parametrize("fusions", ["off", "auto"])
def test_on_one_device(fusions: str) -> None:
    check(_trained(1, {}, fusions, "sgd"), left=False)


@captures_of("scripts")
def _small_gradients() -> float:
    """A bound that nothing reaches changes nothing."""
    plain, planned = gpt(), gpt()
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, planned))
    graphaccel.optimize(planned, second, devices=2, clip_norm=1e6, fusions="auto", data=2)
    for model, optimizer in ((plain, first), (planned, second)):
        model(**tokens()).backward()
        optimizer.step()
    return furthest(plain.state_dict(), graphaccel.full_state_dict(planned))


def test_a_norm_below_the_bound_changes_nothing(pool: Pool) -> None:
    assert max(pool.run(2, _small_gradients)) <= 1e-12


# --- overflows of fp16 in the fused step ----------------------------------------------------------


@captures_of("scripts")
def _overflowed(pins: Mapping[str, Any], kind: str) -> dict[str, list[Any]]:
    torch.manual_seed(7)
    model = Loud()
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, dampening=0.3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    }[kind](model.parameters())
    x, _ = small_batch()
    graphaccel.optimize(
        model, optimizer, devices=2, precision="fp16", fusions="auto", example_batch=x, **pins
    )
    own = {n: p for n, p in model.named_parameters() if not isinstance(p, RemoteTensor)}
    seen: dict[str, list[Any]] = {"moved": [], "factors": [], "finite": [], "steps": []}
    for _ in range(12):
        before = {n: p.detach().clone() for n, p in own.items()}
        model(x).backward()
        seen["finite"].append(bool(torch.isfinite(nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        ))))  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        seen["moved"].append(any(not torch.equal(p, before[n]) for n, p in own.items()))
        seen["factors"].append(model.graphaccel.loss_scale)
        counts = {float(s["step"]) for p in own.values() if (s := optimizer.state.get(p, {}))
                  if "step" in s}  # fmt: skip
        seen["steps"].append(sorted(counts))
        assert all(bool(torch.isfinite(p).all()) for p in own.values())
    seen["state"] = [
        bool(torch.isfinite(t).all())
        for p in own.values()
        for t in optimizer.state.get(p, {}).values()
        if isinstance(t, torch.Tensor)
    ]
    return seen


OVERFLOWS: dict[str, tuple[dict[str, Any], str]] = {
    "data-sgd": ({"data": 2}, "sgd"),
    "zero1-adamw": ({"data": 2, "zero": 1}, "adamw"),
    "zero3-sgd": ({"data": 2, "zero": 3}, "sgd"),
    "zero3-adamw": ({"data": 2, "zero": 3}, "adamw"),
    "pipeline-adamw": ({"pipeline": 2}, "adamw"),
    "zero1-rmsprop": ({"data": 2, "zero": 1}, "rmsprop"),
    "pipeline-rmsprop": ({"pipeline": 2}, "rmsprop"),
}


@pytest.mark.parametrize("case", list(OVERFLOWS))
def test_an_overflow_leaves_the_update_out(pool: Pool, case: str) -> None:
    pins, kind = OVERFLOWS[case]
    for seen in pool.run(2, _overflowed, pins, kind):
        moved, factors = seen["moved"], seen["factors"]
        skipped = moved.index(True)
        assert 0 < skipped < 12
        assert all(moved[skipped:])
        assert seen["finite"] == moved  # gradients of such a step say so, on every rank
        assert factors[:skipped] == [65536.0 / 2 ** (i + 1) for i in range(skipped)]
        assert set(factors[skipped:]) == {factors[skipped - 1]}
        assert all(seen["state"])
        if kind == "adamw":
            assert seen["steps"][-1] == [float(12 - skipped)]  # a step left out is not counted
