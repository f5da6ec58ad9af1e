"""No false alarm: models of the zoo are proved equal to eager."""

from __future__ import annotations

from typing import Any

import pytest

from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import as_batch, model_of
from graphaccel.proof.comparison import pair_of
from graphaccel.proof.first_step import prove
from tests.support import parity
from tests.support.captures import read_captures, write_captures
from tests.support.casts import lift_loss_cast


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_models_of_the_zoo_are_proved(name: str) -> None:
    found: dict[Any, Any] = {}
    kept = f"{name} float64 True"  # what tests of parity captured
    read_captures(kept, found)
    model, given, loss_fn = parity.build(name, "float64")
    with lift_loss_cast():
        captures = Captures(model_of(model, loss_fn, None, "cpu"))
        captures.steps = found
        batch = as_batch(given)
        step, sizes = captures.of(batch)
        made = prove(pair_of(model, loss_fn, step, batch, sizes))
    write_captures(kept, captures.steps)
    trained = sum(p.requires_grad for p in model.parameters())
    assert made.proved
    assert f"loss and {trained} gradients equal eager's (" in made.text
    assert made.error < 1e-12
