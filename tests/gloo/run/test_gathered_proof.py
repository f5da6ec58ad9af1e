"""Models whose weights no rank holds in full: gathered, they are compared before a first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import GraphAccelError
from graphaccel.proof import first_step, gate
from tests.gloo.run.test_first_step import Dropped
from tests.proof.models import DEEP, Deep, Layer, Reverse, batch
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("data", "zero3", "tensor", "pipeline")


def _hidden(x: Tensor) -> Tensor:
    """What no capture sees."""
    return x if torch.compiler.is_exporting() else Reverse.apply(x)


@captures_of("gathered proof")
def _first(kind: type[nn.Module], pins: Mapping[str, Any], fault: bool) -> tuple[str, list[str]]:
    """(code, what is said of proofs) of the first step of a model without weights."""
    torch.manual_seed(3)
    said: list[str] = []
    note = lambda phase, what, _seconds: said.append(f"{phase} {what}")  # noqa: E731
    code = ""
    with patch.object(first_step, "progress", note), patch.object(gate, "progress", note):
        model: nn.Module = graphaccel.deferred(kind)
        for layer in model.modules() if fault else ():
            if isinstance(layer, Layer):
                layer.middle = _hidden
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphaccel.optimize(model, optimizer, devices=2, **pins)
        try:
            model(*batch().leaves)
        except GraphAccelError as error:
            code = error.code
    return code, said


EARLY = "not proved the model has no weights yet to compare with eager; it is compared when it has"


@pytest.mark.parametrize("plan", PLANS)
def test_layers_are_gathered_and_compared(pool: Pool, plan: str) -> None:
    (code, said), (other, silent) = pool.run(2, _first, Deep, PLANS[plan], False)
    assert (code, other) == ("", "")
    assert said[0] == EARLY
    few = "" if plan == "data" else f"block by block, {DEEP} layers: "
    gradients = 12 if few else 2 * DEEP + 4
    assert said[1].startswith(f"proved {few}loss and {gradients} gradients equal eager's (")
    assert not [line for line in silent if "eager" in line]


@pytest.mark.parametrize("plan", ["zero3", "pipeline"])
def test_a_capture_that_differs_stops_all_ranks(pool: Pool, plan: str) -> None:
    codes = [code for code, _ in pool.run(2, _first, Deep, PLANS[plan], True)]
    assert codes == ["GA108", "GA108"]


def test_a_small_model_is_gathered_in_full(pool: Pool) -> None:
    (code, said), _ = pool.run(2, _first, Dropped, PLANS["zero3"], False)
    assert code == ""
    assert said[1].startswith("proved loss and 6 gradients equal eager's (")


@captures_of("gathered proof")
def _without_memory() -> tuple[str, list[str]]:
    with patch.object(first_step, "free_memory", lambda *_: 0.0):
        return _first(Dropped, PLANS["zero3"], False)


def test_memory_that_does_not_suffice_is_said(pool: Pool) -> None:
    (code, said), _ = pool.run(2, _without_memory)
    assert code == ""
    assert said[1] == (
        "not proved not enough memory for all weights on one rank, and its graph was not captured "
        "from few of many identical layers"
    )
