"""A forward at sizes that no capture has seen: captured anew where it computes otherwise, and only
there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import model_of


class Net(nn.Module):
    """`forward(x [B, T, 4])`; the script computes the loss."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(torch.tanh(self.layer(x)))


def batch(rows: int, length: int, tracked: bool) -> Batch:
    return flatten_call((torch.ones(rows, length, 4, requires_grad=tracked),), {})


def captured(use: Callable[[Tensor], Tensor], tracked: bool = False) -> list[int]:
    """How many captures there are after each batch."""
    captures = Captures(model_of(Net(use), "outside", None, "cpu"))
    counts = []
    for rows in (8, 6, 12, 24, 40, 12):
        captures.of(batch(rows, 4, tracked))
        counts.append(len(captures.steps))
    return counts


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "no size": lambda h: h,
    "a scale": lambda h: h / h.shape[0] ** 0.5,
    "a product": lambda h: h.reshape(h.shape[0] * h.shape[1], 4) * h.numel(),
    "a sum": lambda h: torch.cat([h, h[:1]]) * (h.shape[0] + 1),
}


@pytest.mark.parametrize("tracked", [False, True], ids=["data", "with a gradient"])
@pytest.mark.parametrize("use", SAME)
def test_one_capture_serves_sizes_of_the_same_calls(use: str, tracked: bool) -> None:
    assert captured(SAME[use], tracked) == [1] * 6


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "an operator": lambda h: h * 7 if h.shape[0] > 16 else h,
    "a number": lambda h: h * (7 if h.shape[0] > 16 else 8),
    "a float": lambda h: h * (0.5 if h.shape[0] > 16 else 0.25),
}


@pytest.mark.parametrize("use", OTHER)
def test_each_side_of_a_branch_has_a_capture(use: str) -> None:
    assert captured(OTHER[use]) == [1, 1, 1, 2, 2, 2]


class Counted(Net):
    """Returns sizes beside its loss, as numbers and in a text."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = super().forward(x)
        rows = {"rows": len(x), "shape": x.shape, "half": x.numel() / 2, "text": f"{len(x)} rows"}
        return {"loss": h.square().mean(), **rows, "fixed": 3}


def _sizes(optimized: bool) -> list[dict[str, Any]]:
    model, made = Counted(lambda h: h), []
    if optimized:
        model = graphaccel.optimize(model, devices=1)
    for rows in (8, 6, 1, 8):
        output = model(torch.ones(rows, 5, 4))
        made.append({name: value for name, value in output.items() if name != "loss"})
    return made


def test_sizes_that_are_returned_are_those_of_the_batch() -> None:
    assert _sizes(True) == _sizes(False)
