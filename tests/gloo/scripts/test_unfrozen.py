"""Parameters that the script freezes and unfreezes after the step is captured: eager's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import graphaccel
from graphaccel.dispatch import steps
from graphaccel.errors import BatchesDiffer
from tests.gloo.scripts.test_semantics import furthest as furthest_state
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, plans_of_two, weights

pytestmark = pytest.mark.multiprocess


class Tuned(nn.Module):
    """A base and a head; `forward(x, y)`: [8, 8] twice → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(self.base(x).tanh()), y)


def _trained(pins: dict[str, Any] | None, *, group: bool) -> dict[str, torch.Tensor]:
    """Weights after two steps of the head alone and two of both. group: the optimizer is given the
    base when it is unfrozen."""
    torch.manual_seed(0)
    model = Tuned().double()
    x, y = torch.randn(2, 8, 8).double()
    trained = model.head if group else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    if pins is not None:
        graphaccel.optimize(model, optimizer, example_batch=(x, y), **pins)
    model.base.requires_grad_(False)
    for step in range(4):
        if step == 2:
            model.base.requires_grad_(True)
            if group:
                optimizer.add_param_group({"params": list(model.base.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


@captures_of("unfrozen")
def _difference(pins: dict[str, Any], group: bool) -> float:
    return furthest_state(_trained(pins, group=group), _trained(None, group=group))


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(
    "pins",
    [
        {"data": 2},
        {"data": 2, "zero": 2},
        {"data": 2, "zero": 3},
        {"pipeline": 2, "microbatches": 2},
    ],
)
def test_frozen_after_the_capture(pool: Pool, pins: dict[str, Any], group: bool) -> None:
    assert max(pool.run(2, _difference, pins, group)) <= 1e-10


def _lengths(pins: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Weights after steps on two shapes of batches, the second with a base that was frozen, and
    unfrozen later."""
    torch.manual_seed(0)
    model = Tuned().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    for step, trained in enumerate((True, True, False, False, True)):
        model.base.requires_grad_(trained)
        x, y = torch.randn(2, 8, *([3] if step > 1 else []), 8).double()
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    return model.state_dict() if pins is None else graphaccel.full_state_dict(model)


@captures_of("unfrozen, two shapes")
def _difference_of_lengths(pins: dict[str, Any]) -> float:
    return furthest_state(_lengths(pins), _lengths(None))


@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": 2, "microbatches": 2}])
def test_captured_again_while_frozen(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _difference_of_lengths, pins)) <= 1e-10


class Deep(nn.Module):
    """Four layers with a norm; `forward(x, y)`: [8, 8] twice → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(self.head(self.norm(x)), y)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step)).double()
    return x, y


def _unfreeze(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in layer.parameters():
        parameter.requires_grad = True
    optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.01})


def gradual(wrap: Wrap) -> Iterator[torch.Tensor]:
    """Unfreezes from the head down, a layer at a time, and freezes one again at the end."""
    model = Deep().double().requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.05)
    wrap(model, optimizer)
    for step in range(8):
        if step in (2, 4):
            _unfreeze(model.layers[3 - step // 2], optimizer)
        if step == 6:
            model.layers[2].requires_grad_(False)
        optimizer.zero_grad()
        loss = model(*_batch(step))
        loss.backward()
        yield loss
        optimizer.step()
        yield from weights(model)


def whole_optimizer(wrap: Wrap) -> Iterator[torch.Tensor]:
    """The optimizer has every parameter from the start; gradients of two batches are added up and
    clipped, the layers are unfrozen between the two."""
    model = Deep().double()
    model.layers.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrap(model, optimizer)
    for step in range(6):
        if step == 3:
            model.layers.requires_grad_(True)
        loss = model(*_batch(step)) / 2
        loss.backward()
        yield loss
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            yield from weights(model)


def alternating(wrap: Wrap) -> Iterator[torch.Tensor]:
    """Trains two parts in turn, neither of them when the step is captured first with the other."""
    model = Deep().double()
    parts = model.layers, model.head
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    parts[1].requires_grad_(False)
    wrap(model, optimizer)
    for step in range(6):
        for number, part in enumerate(parts):
            part.requires_grad_(step % 2 == number)
        optimizer.zero_grad()
        loss = model(*_batch(step))
        loss.backward()
        yield loss
        optimizer.step()
        yield from weights(model)


SCRIPTS = {each.__name__: each for each in (gradual, whole_optimizer, alternating)}
PLANS = plans_of_two("data", "zero1", "zero3", "tensor", "pipeline") | {
    "zero2": {"data": 2, "zero": 2, "microbatches": 2},
    "offload": {"data": 2, "zero": 1, "offload": ("optimizer",)},
}


@captures_of("unfrozen in mid-run")
def _furthest(name: str, pins: dict[str, Any]) -> float:
    return furthest(SCRIPTS[name], pins)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("plan", PLANS)
def test_unfrozen_in_mid_run(pool: Pool, plan: str, script: str) -> None:
    assert max(pool.run(2, _furthest, script, PLANS[plan])) <= 1e-12


def _said(pins: dict[str, Any]) -> tuple[str, int, int]:
    """What is reported of an unfreezing, the memory that is predicted then, and that of a model
    that was never frozen."""
    predicted, said = [], []
    for frozen in (True, False):
        model: Any = Deep().double()
        model.layers.requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        graphaccel.optimize(model, optimizer, example_batch=_batch(0), **pins)
        if frozen:
            _unfreeze(model.layers, optimizer)
        with patch.object(steps, "progress", lambda *line: said.append(line)):
            model(*_batch(1)).backward()
        predicted.append(model.graphaccel.predicted_peak_bytes)
    ((phase, text, _),) = said
    return f"{phase} {text}", *predicted


def test_what_is_reported(pool: Pool) -> None:
    said, after, fresh = pool.run(2, _said, {"data": 2, "zero": 2})[0]
    assert after == fresh
    named = "layers.0.weight, layers.0.bias, layers.1.weight and 3 more"
    again = "the step is captured anew, under the same plan"
    assert said.startswith(f"unfrozen {named}: {again}, ")
    assert said.endswith("GiB predicted"), "with what the allocator keeps"


def _on_one_rank(frozen: bool, pins: dict[str, Any]) -> str:
    """The second rank alone freezes, or unfreezes."""
    torch.manual_seed(0)
    model = Deep().double()
    model.layers.requires_grad_(frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, **pins)
    model(*_batch(0)).backward()
    if dist.get_rank() == 1:
        model.layers.requires_grad_(not frozen)
    with pytest.raises(BatchesDiffer) as caught:
        model(*_batch(1))
    return str(caught.value)


@pytest.mark.parametrize("frozen", [True, False])
def test_on_one_rank_alone(pool: Pool, frozen: bool) -> None:
    said = """\
error[GA404]: at step 1 other parameters require a gradient on rank 1 than on rank 0
  why:  every rank runs the same script and makes the same calls in the same order
  help: freeze and unfreeze on every rank, not below `if rank == 0`
  explain: graphaccel explain GA404"""
    assert pool.run(2, _on_one_rank, frozen, PLANS["data"]) == [said, said]
