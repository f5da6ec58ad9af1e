"""A number of the batch's size that a forward leaves for the script: never an old one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors

ROWS = 0


def _in_global(_: Any, x: Tensor) -> None:
    global ROWS
    ROWS = len(x)


def _in_attribute(model: Any, x: Tensor) -> None:
    model.rows = x.shape[0]


def _in_dict(model: Any, x: Tensor) -> None:
    model.kept["rows"] = x.numel()


def _in_module(model: Any, x: Tensor) -> None:
    model.layer.rows = 1.0 / x.size(0)


class Net(nn.Module):
    """Inputs [B, 4] → loss."""

    def __init__(self, leave: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.leave = nn.Linear(4, 4), leave
        self.kept: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.leave(self, x)
        return self.layer(x).square().mean()


USES: tuple[Callable[[Any], Any], ...] = (
    lambda value: value == 8,
    lambda value: value != 8,
    lambda value: 100 // value,
    lambda value: 100 % value,
    lambda value: divmod(value, 2),
    lambda value: value | 1,
    lambda value: math.floor(value),
    lambda value: value in [1, 2],
    lambda value: {"rows": value} == {"rows": 8},
)
READS: dict[Callable[[Any, Tensor], None], Callable[[Any], Any]] = {
    _in_attribute: lambda model: model.rows + 1,
    _in_dict: lambda model: model.kept["rows"] == 32,
    _in_module: lambda model: float(model.layer.rows),
}


@pytest.mark.parametrize("leave", READS)
def test_what_is_left_in_the_model_has_no_value(leave: Callable[[Any, Tensor], None]) -> None:
    model = graphaccel.optimize(Net(leave), devices=1)
    for rows in (8, 4):
        model(torch.randn(rows, 4)).backward()
        with pytest.raises(errors.OutputDropped):
            READS[leave](model)


def test_no_use_of_it_passes() -> None:
    """`==` compared the placeholder itself, and was false."""
    model: Any = graphaccel.optimize(Net(_in_attribute), devices=1)
    model(torch.randn(8, 4)).backward()
    for use in USES:
        with pytest.raises(errors.OutputDropped):
            use(model.rows)


def test_what_is_left_in_a_global_is_refused() -> None:
    model = graphaccel.optimize(Net(_in_global), devices=1)
    with pytest.raises(errors.StateFrozen) as raised:
        model(torch.randn(8, 4))
    text = str(raised.value)
    assert "ROWS = len(x)" in text.split("\n")[2]
    assert "set it in the script alone, before each step:  ROWS = len(batch)" in text
