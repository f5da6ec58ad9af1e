"""Python state that changes between steps, under plans of two processes, against eager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.gloo.scripts.test_semantics import furthest
from tests.support.inside import captures_in
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


class Scheduled(nn.Module):
    """`forward(x, y)` → loss; alpha: a number that is scheduled, table: a plain tensor [6]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.0)
        self.alpha, self.table = 1.0, torch.ones(6, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.drop(F.gelu(self.a(x) / self.alpha)) * self.table
        x = self.b(x)
        return F.mse_loss(x, y) + (1 - self.alpha) * x.square().mean()


def _trained(pins: Mapping[str, Any]) -> tuple[float, int]:
    states, captures = [], 0
    x, y = torch.linspace(-2, 2, 96, dtype=torch.float64).view(2, 8, 6).sin()
    for planned in (False, True):
        torch.manual_seed(0)
        model = Scheduled().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if planned:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
        for step in range(4):
            model.alpha, model.drop.p = 1 + step / 4, float(step == 3)
            model.table = torch.full((6,), 1.0 + step, dtype=torch.float64)
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
        if planned:
            with torch.no_grad():
                model.alpha = 3.0
                loss = model.eval()(x, y).item()
                captures = len(captures_in(model).steps)
                states.append(graphaccel.full_state_dict(model))
        else:
            with torch.no_grad():
                model.alpha = 3.0
                eager = model.eval()(x, y).item()
            states.append(model.state_dict())
    return max(furthest(*states), abs(loss - eager)), captures


@pytest.mark.parametrize(
    "pins",
    [{"data": 2, "zero": 3}, {"data": 1, "pipeline": 2, "microbatches": 2}],
    ids=str,
)
def test_state_that_changes(pool: Pool, pins: dict[str, Any]) -> None:
    for off, captures in pool.run(2, _trained, pins):
        assert off < 1e-12
        assert captures == 4  # as it was; with a number as an input; for p of 1; to evaluate


def _differing() -> str:
    model = Scheduled().double()
    graphaccel.optimize(model, devices=2, data=2)
    x, y = torch.linspace(-2, 2, 96, dtype=torch.float64).view(2, 8, 6).sin()
    model(x, y)
    model.alpha = 2.0 + torch.distributed.get_rank()
    try:
        model(x, y)
    except graphaccel.GraphAccelError as error:
        return error.code
    return "none"


def test_ranks_whose_values_differ_all_raise(pool: Pool) -> None:
    assert pool.run(2, _differing) == ["GA404", "GA404"]


class Exits(nn.Module):
    """A loss at every layer up to `depth`, an attribute; `kind` is a plain value of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])
        self.depth = 4

    def forward(
        self, x: Tensor, labels: Tensor | None = None, kind: str = "sum", return_loss: bool = False
    ) -> Any:
        losses = []
        for layer, head in zip(self.layers[: self.depth], self.heads, strict=False):
            x = layer(x).tanh()
            losses.append(F.cross_entropy(head(x), labels))
        loss = torch.stack(losses).sum() if kind == "sum" else torch.stack(losses).mean()
        return {"loss": loss, "x": x} if return_loss else x


def _exits(
    pins: Mapping[str, Any], depths: tuple[int, ...], kinds: tuple[str, ...]
) -> tuple[float, int]:
    states, captures = [], 0
    for planned in (False, True):
        torch.manual_seed(0)
        model = Exits().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if planned:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
        for model.depth, kind in zip(depths, kinds, strict=True):
            x, labels = torch.randn(8, 6).double(), torch.randint(3, (8,))
            optimizer.zero_grad()
            model(x, labels=labels, kind=kind, return_loss=True)["loss"].backward()
            optimizer.step()
        states.append(graphaccel.full_state_dict(model) if planned else model.state_dict())
        captures = len(captures_in(model).steps) if planned else 0
    return furthest(*states), captures


def test_a_depth_at_which_the_last_stage_has_no_layer(pool: Pool) -> None:
    pins = {"data": 1, "pipeline": 2, "microbatches": 2}
    for off, captures in pool.run(2, _exits, pins, (4, 1, 4, 1), ("sum",) * 4):
        assert off < 1e-12
        assert captures == 2


@pytest.mark.parametrize(
    "pins", [{"data": 2}, {"data": 1, "pipeline": 2, "microbatches": 2}], ids=str
)
def test_plain_values_of_the_call_are_captured_once_each(pool: Pool, pins: dict[str, Any]) -> None:
    kinds = ("sum",) * 5 + ("mean", "sum", "mean")
    for off, captures in pool.run(2, _exits, pins, (4,) * 8, kinds):
        assert off < 1e-12
        assert captures == 2
