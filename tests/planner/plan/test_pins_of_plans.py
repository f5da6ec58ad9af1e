"""Plans read back as the pins that ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.errors import BadPin
from graphaccel.passes.pipeline import prepared
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.validate_plan import check_fusions, check_given, misread, pins_of
from tests.support.zoo import ALL

PINS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("gpt", {}),
    "pipeline": ("gpt", {"pipeline": 2, "data": 2, "microbatches": 2, "recompute": "all"}),
    "interleaved": ("gpt", {"pipeline": 2, "interleave": 2, "data": 2}),
    "zero bubble": ("gpt", {"pipeline": 4, "schedule": "zero_bubble", "microbatches": 4}),
    "gathered once": (
        "gpt",
        {"reshard_after_forward": "once_per_step", "data": 4, "precision": "bf16"},
    ),
    "shards": ("gpt", {"accumulation": "shards", "microbatches": 2, "pipeline": 1}),
    "cast once": ("gpt", {"cast_once": True, "precision": "bf16-params", "microbatches": 2}),
    "host": ("gpt", {"offload": "optimizer+parameters", "data": 4}),
    "tensor": ("gpt", {"tensor": 2, "fusions": "auto", "precision": "bf16"}),
    "words": ("gpt", {"tensor": 2, "vocab": "tensor"}),
    "context": ("gpt", {"context": 2, "recompute": "some"}),
    "by heads": ("gpt", {"context": 2, "context_by": "heads"}),
    "sends": ("gpt", {"tensor": 2, "pipeline": 2, "scatter_sends": True}),
    "loss outside": ("linear", {"data": 4}),
    "fused": ("gpt", {"fusions": "auto", "loss_chunk": 4, "outputs": "loss"}),
}

pytestmark = pytest.mark.usefixtures("shared_captures")


def _linear() -> tuple[nn.Module, tuple[torch.Tensor], str]:
    return nn.Linear(8, 8), (torch.ones(8, 8),), "outside"


@pytest.mark.parametrize(("name", "pins"), PINS.values(), ids=PINS)
def test_a_plan_that_was_found_can_be_given(name: str, pins: dict[str, Any]) -> None:
    """It passes what is checked, as it is and from a file; and what it is read back as asks for
    it."""
    module, batch, loss_fn = ALL[name].build() if name in ALL else _linear()
    where = cluster("h100-80gb", 4)
    compiler = Compiler(Model(module, loss_fn, 2.0), where, pins)
    chosen = compiler.choose(as_batch(batch))
    step, plan = chosen.step, chosen.plan
    assert set(pins) <= set(plan.pinned)
    for given in (plan, Plan.from_json(plan.to_json())):
        assert misread(given) is None
        check_fusions(given, "plan", "cuda")
        check_given(given, "plan")
        check_given(given, "plan", prepared(step, given))
    again = Compiler(Model(module, loss_fn, 2.0), where, pins_of(plan))
    again.captures.steps = compiler.captures.steps
    found = again.choose(as_batch(batch)).plan
    assert replace(found, pinned=()).decided(notes=()) == replace(plan, pinned=()).decided(notes=())


def test_rows_at_a_time_are_not_pinned_where_nothing_goes_over_rows() -> None:
    module, batch, loss_fn = ALL["gpt"].build()
    pins = {"fusions": "auto", "loss_chunk": 4, "tensor": 2}
    compiler = Compiler(Model(module, loss_fn, 2.0), cluster("h100-80gb", 2), pins)
    with pytest.raises(BadPin) as caught:
        compiler.choose(as_batch(batch))
    assert str(caught.value) == (
        "error[GA202]: loss_chunk=4 can not be planned\n"
        "  why:  with tensor=2 the graph has no fused head and loss\n"
        "  help: leave loss_chunk out and it will be chosen for you\n"
        "  explain: graphaccel explain GA202"
    )
