"""torch's profiler shows the actions of a step by stage and microbatch."""

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
