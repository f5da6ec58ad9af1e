"""A script that runs under Python's profiler is captured, and profiled on."""

from __future__ import annotations

import cProfile
import pstats

import torch
from torch import nn

import graphaccel


def _after() -> None:
    pass


def test_the_profiler_goes_on() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = graphaccel.optimize(
        model, optimizer, devices=1, loss_fn=lambda y, target: (y - target).square().sum()
    )
    profile = cProfile.Profile()
    profile.enable()
    try:
        model(torch.ones(2, 4), target=torch.zeros(2)).backward()
        _after()
    finally:
        profile.disable()
    names = {name for _, _, name in pstats.Stats(profile).stats}
    assert "_after" in names
