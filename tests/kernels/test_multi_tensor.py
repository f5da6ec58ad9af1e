"""Optimizer steps over many tensors are those of torch.optim, whatever is done in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphaccel.kernels.multi_tensor.steps import AdamRule, Around, MultiTensor, SGDRule
from graphaccel.runtime.parameters.optimizer_step import OptimizerStep

SHAPES = ((3, 5), (7,), (), (2, 3, 4))
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=3e-2),
    "adam": lambda groups: torch.optim.Adam(groups, lr=3e-2, betas=(0.8, 0.9), eps=1e-6),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=3e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=3e-2, momentum=0.9, dampening=0.2),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=3e-2, momentum=0.9, nesterov=True),
}


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]


def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups of different decay and learning rate."""
    return [
        {"params": params[:2], "weight_decay": 0.1},
        {"params": params[2:], "weight_decay": 0.0, "lr": 0.5},
    ]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if seed == 2 and i == 1:
            p.grad = None  # this one sits a step out: its count lags behind


def train(make: Callable[[Any], torch.optim.Optimizer], ours: bool) -> tuple[Any, Any]:
    params = weights()
    optimizer = make(grouped(params))
    step = OptimizerStep(optimizer) if ours else None
    if step is not None:
        step.start()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    for seed in range(4):
        give_gradients(params, seed)
        optimizer.step()
        schedule.step()
    assert step is None or not step.reasons
    return [p.detach() for p in params], optimizer.state_dict()


@pytest.mark.parametrize("name", list(MAKERS))
def test_steps_and_states_are_those_of_torch(name: str) -> None:
    expected, state = train(MAKERS[name], ours=False)
    got, mine = train(MAKERS[name], ours=True)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)
    assert mine["param_groups"] == state["param_groups"]
    assert mine["state"].keys() == state["state"].keys()
    for number, entries in state["state"].items():
        assert mine["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda g: torch.optim.AdamW(g, amsgrad=True), "amsgrad=True"),
        (lambda g: torch.optim.SGD(g, lr=0.1, maximize=True), "maximize=True"),
        (lambda g: torch.optim.Adam(g, lr=torch.tensor(0.1)), "that is a tensor"),
        (lambda g: torch.optim.RMSprop(g), "RMSprop is neither Adam, AdamW nor SGD"),
    ],
)
def test_what_is_left_to_torch_says_why(make: Any, reason: str) -> None:
    results = []
    for ours in (False, True):
        params = weights()
        optimizer = make(params)
        step = OptimizerStep(optimizer)
        if ours:
            step.start()
        give_gradients(params, 0)
        if ours:
            optimizer.step()
            assert reason in step.reasons[0]
        else:
            type(optimizer).step(make(params))
        results.append([p.detach() for p in params])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_hooks_of_the_script_see_parameters_and_gradients() -> None:
    """One added later, which would see the update done already, leaves that step to torch."""
    params = weights()
    optimizer = MAKERS["adamw"](grouped(params))
    seen: list[int] = []

    def count(of: Any, *_: Any) -> None:
        seen.append(sum(p.grad is not None for g in of.param_groups for p in g["params"]))

    optimizer.register_step_post_hook(count)
    OptimizerStep(optimizer).start()

    def halve(of: Any, *_: Any) -> None:
        for p in params:
            p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    plain = weights()
    other = MAKERS["adamw"](grouped(plain))
    for seed in (0, 1):
        give_gradients(params, seed)
        optimizer.step()
        give_gradients(plain, seed)
        halve_all = [p.grad.mul_(0.5) for p in plain]
        assert len(halve_all) == 4
        other.step()
    assert seen == [4, 4]
    for a, b in zip(plain, params, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("overflow", [False, True])
def test_scale_clip_skip_copy_and_zero_in_one_pass(kind: str, overflow: bool) -> None:
    params, plain = weights(), weights()
    give_gradients(plain, 0)
    norm = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    grads = []
    give_gradients(params, 0)
    for p in params:
        grads.append(p.grad * 8)
    if overflow:
        grads[0][0, 0] = float("inf")
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
    around = Around(torch.tensor(8.0), max_norm=0.5, finite=True, zero=True, copies=copies)
    held = [p.detach() for p in params]
    before = [p.clone() for p in held]
    steps = [torch.zeros(()) for _ in params]
    if kind == "adam":
        rules = [AdamRule(0.1, 0.9, 0.99, 1e-8, 0.1, True)] * 4
        moments = [[torch.zeros_like(p) for p in held] for _ in range(2)]
        found = MultiTensor().adam(held, grads, *moments, steps, rules, around)
        torch.optim.AdamW(plain, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1).step()
    else:
        rules = [SGDRule(0.1, 0.0, 0.0, False, 0.1)] * 4
        found = MultiTensor().sgd(held, grads, [None] * 4, [False] * 4, rules, around)
        torch.optim.SGD(plain, lr=0.1, weight_decay=0.1).step()
    assert found is not None
    assert all(not g.any() for g in grads)
    if overflow:
        assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
        assert all(not c.any() for c in copies)
        assert not any(steps)
        return
    torch.testing.assert_close(found.double(), norm, rtol=1e-6, atol=0)
    for a, b, c in zip(plain, held, copies, strict=True):
        torch.testing.assert_close(b, a.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(c, b.to(torch.bfloat16))


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_after_a_first_step_that_was_left_out(dampening: float) -> None:
    """As torch.amp.GradScaler leaves one out: nothing of it is in the momentum."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=dampening, fused=True)

    params, plain = weights(), weights()
    ours, theirs = make(params), make(plain)
    OptimizerStep(ours).start()
    give_gradients(params, 0)
    ours.found_inf = torch.ones(())  # type: ignore[attr-defined]
    ours.step()
    ours.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    for seed in (1, 3):
        for some, optimizer in ((params, ours), (plain, theirs)):
            give_gradients(some, seed)
            optimizer.step()
    for a, b in zip(plain, params, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)
