"""Programs of deep models are made of few layers, and are those that all layers give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.ir.text import graph_text
from graphaccel.model import without_data
from graphaccel.passes import pipeline
from graphaccel.passes.pipeline import build
from graphaccel.planner.plan import Plan
from tests.support.gpt import GPT

LAYERS = 6


@pytest.fixture(scope="module")
def deep() -> StepGraph:
    fake = without_data(GPT(layers=LAYERS, width=64))
    with next(fake.parameters()).fake_mode:
        ids = torch.empty(8, 8, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": torch.empty_like(ids)}
    step = capture(fake, flatten_call((), batch), many=4)
    assert step.repeats is not None
    return step


def texts(step: StepGraph, plan: Plan) -> list[str]:
    program = build(step, plan, sizes=step.sizes)
    graphs = [g for stage in program.stages for g in (stage.forward, *stage.backwards.values())]
    return [graph_text(g.graph, notes=True) for g in graphs]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(4, data=2, tensor=2, zero=3, microbatches=2, batch=8, sequence=False),
        Plan(2, data=2, microbatches=2, batch=8, recompute=("blocks.1", "blocks.4")),
    ],
    ids=lambda plan: plan.name,
)
def test_programs_are_those_of_all_layers(
    plan: Plan, deep: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded: list[int] = []
    real = pipeline.shard_axes

    def counting(graph, step, *rest):  # type: ignore[no-untyped-def]
        sharded.append(len(step.blocks))
        return real(graph, step, *rest)

    monkeypatch.setattr(pipeline, "shard_axes", counting)
    few = texts(deep, plan)
    assert sharded == [3, 4]
    sharded.clear()
    assert few == texts(replace(deep, repeats=None, derived={}), plan)
    assert sharded == [LAYERS]
