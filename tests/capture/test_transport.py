"""A capture that travelled as bytes is the same capture, for passes too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.transport import packed, unpacked
from graphaccel.compiler.programs import build
from graphaccel.ir.text import graph_text
from graphaccel.planner.plan.plan import Plan, Precision


@pytest.mark.parametrize("model", ["gpt", "t5"])
def test_a_capture_survives_the_way(captured: Callable[[str], StepGraph], model: str) -> None:
    step = captured(model)
    other = unpacked(packed(step))
    assert other is not None
    assert other.text() == step.text()
    assert other.sizes == step.sizes
    assert other.blocks == step.blocks
    assert other.forward.constants.keys() == step.forward.constants.keys()
    for name, value in step.forward.constants.items():
        torch.testing.assert_close(other.forward.constants[name], value)


def test_passes_make_the_same_of_it(captured: Callable[[str], StepGraph]) -> None:
    step = captured("gpt")
    other = unpacked(packed(step))
    assert other is not None
    # bf16 rewrites the forward graph and differentiates it again: module paths are needed too.
    plan = Plan(
        2, data=2, microbatches=2, batch=step.batch_size, precision=Precision(compute="bfloat16")
    )
    texts = [
        [graph_text(g.graph, notes=True) for stage in build(s, plan, sizes=s.sizes).stages
         for g in (stage.forward, *stage.backwards.values())]
        for s in (step, other)
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_a_graph_that_changed_on_the_way_is_refused(captured: Callable[[str], StepGraph]) -> None:
    step = captured("gpt")
    step = StepGraph(**{k: v for k, v in vars(step).items() if k in StepGraph.__match_args__})
    vars(step)["fingerprint"] = "another"
    assert unpacked(packed(step)) is None
