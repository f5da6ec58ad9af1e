"""torch's profiler shows the actions of a step by stage and microbatch, and in each its modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import graphaccel
from graphaccel.schedule.table import Action
from graphaccel.schedule.walk import Doing, range_name


def test_names() -> None:
    receive = Action("receive", 1, 3, 0, "forward")
    assert range_name(Doing("wait", receive)) == (
        "graphaccel: wait receive forward, stage 1 with 0, microbatch 3"
    )
    assert range_name(Doing("reduce", Action("reduce", 2, -1))) == "graphaccel: reduce, stage 2"


def test_a_step_has_its_ranges() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    graphaccel.optimize(model, devices=1, microbatches=2, loss_fn=nn.functional.cross_entropy)
    x, y = torch.randn(4, 4), torch.randint(2, (4,))
    model(x, y).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(x, y).backward()
    names = [event.key for event in profiled.key_averages()]
    for kind in ("forward", "backward"):
        for microbatch in (0, 1):
            assert f"graphaccel: {kind}, stage 0, microbatch {microbatch}" in names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


def _profiled(compile: str) -> list[str]:
    """Names of all ranges of a step, whose gradients are those of the step behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 2))
    graphaccel.optimize(model, devices=1, loss_fn=nn.functional.cross_entropy, compile=compile)
    x, y = torch.randn(4, 4), torch.randint(2, (4,))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x, y).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    gradients()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = gradients()
    assert all(map(torch.equal, found, gradients()))
    names = [e.name for e in profiled.events() if e.name.startswith("graphaccel: ")]
    return [name.removeprefix("graphaccel: ") for name in names]


def test_the_calls_of_a_module_are_a_range() -> None:
    modules = ["0.norm", "0.inner", "0", "1.norm", "1.inner", "1", "2"]
    assert _profiled("off") == [
        "forward, stage 0, microbatch 0", *modules,
        "backward, stage 0, microbatch 0", "2", "1", "1.inner", "1.norm", "0", "0.inner", "0.norm",
        "reduce, stage 0",
    ]  # fmt: skip


def test_compiled_code_has_a_range_for_each_piece() -> None:
    assert _profiled("inductor") == [
        "forward, stage 0, microbatch 0", "the model",
        "backward, stage 0, microbatch 0", "the model",
        "reduce, stage 0",
    ]  # fmt: skip
