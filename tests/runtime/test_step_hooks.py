"""Hooks of an optimizer's step, and its closure: gradients are changed after they are computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.runtime.parameters.step_hooks import StepHooks, calls_closure_first


def test_hooks_run_between_closure_and_update() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer, order = torch.optim.SGD([p], lr=1.0), []
    hooks = StepHooks()
    hooks.start(optimizer)
    optimizer.register_step_pre_hook(lambda *_: order.append("the script's"))

    def closure() -> float:
        order.append("closure")
        hooks.add(lambda *_: order.append(f"ours {p.grad is not None} {p.tolist()}"))
        p.grad = torch.ones(2)
        return 3.0

    hooks.add_after_closures(lambda *_: order.append("last"))
    assert optimizer.step(closure=closure) == 3.0
    assert order == ["the script's", "closure", "ours True [1.0, 1.0]", "last"]
    assert p.tolist() == [0.0, 0.0]
    order.clear()
    optimizer.step()
    assert order == ["ours True [0.0, 0.0]", "the script's"]


def test_optimizers_that_call_their_closure_more_than_once() -> None:
    class Own(torch.optim.SGD):
        """May do so."""

    params = [nn.Parameter(torch.ones(2))]
    kinds = torch.optim.AdamW, torch.optim.LBFGS, Own
    assert [calls_closure_first(kind(params)) for kind in kinds] == [True, False, False]


class Regression(nn.Module):
    """`forward(x, y)`: [B, 6], [B, 1] → mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) - y).pow(2).mean()


@pytest.mark.parametrize(
    "pins", [{"fusions": "off"}, {"fusions": "auto"}, {"offload": "optimizer"}]
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_closures_gradients_are_clipped(kind: Any, pins: dict[str, Any]) -> None:
    plain = Regression().double()
    ours = copy.deepcopy(plain)
    first, second = (kind(m.parameters(), lr=0.1) for m in (plain, ours))
    graphaccel.optimize(ours, second, devices=1, clip_norm=0.1, check="off", **pins)
    for _ in range(3):
        x, y = torch.randn(4, 6).double(), torch.randn(4, 1).double()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            second.zero_grad()
            loss = ours(x, y)
            loss.backward()
            return loss

        first.zero_grad()
        loss = plain(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        first.step()
        assert second.step(closure).item() == pytest.approx(loss.item(), rel=1e-12)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-12


def test_with_an_example_batch_the_same_hooks_run_in_the_same_order() -> None:
    torch.manual_seed(0)
    plain = Regression()
    model = copy.deepcopy(plain)
    x, y = torch.randn(8, 6), torch.randn(8, 1)
    steps = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    graphaccel.optimize(
        model, steps[1], devices=1, fusions="auto", clip_norm=1e-3, example_batch=(x, y)
    )
    for each, optimizer in zip((plain, model), steps, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            each(x, y).backward()
            if each is plain:
                nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
            optimizer.step()
    assert not model.graphaccel.left_to_torch
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
