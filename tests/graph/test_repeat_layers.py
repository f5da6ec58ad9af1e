"""Programs of deep models are made of few layers, and are those that all layers give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler import schedule_of
from graphaccel.ir.program import StageProgram, StepProgram
from graphaccel.ir.text import graph_text
from graphaccel.model import without_data
from graphaccel.passes import rewrite
from graphaccel.passes.pipeline import build
from graphaccel.planner.memory import Resident, rank_memory
from graphaccel.planner.plan import Plan, StageMemory
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


def texts(program: StepProgram) -> list[str]:
    graphs = [g for stage in program.stages for g in (stage.forward, *stage.backwards.values())]
    return [graph_text(g.graph, notes=True) for g in graphs]


def said(program: StepProgram) -> list[object]:
    """Everything that a program says besides its graphs."""
    values = [
        (s.forward_inputs, s.forward_outputs, s.backward_inputs, s.backward_outputs,
         s.parameters, s.buffers, s.groups, s.reduced, s.buckets)
        for s in program.stages
    ]  # fmt: skip
    names = "resting partial owned unsharded output_places random loss_partial shared".split()
    return [values, *(getattr(program, name) for name in names)]


def memory(program: StepProgram, plan: Plan) -> StageMemory:
    names = [n for s in program.stages for n in s.parameters]
    held = dict.fromkeys(names, 64)
    return rank_memory(program, schedule_of(plan, program), 0, Resident(held, {}, held, 100, 2.0))


ALL = tuple(f"blocks.{n}" for n in range(LAYERS))


@pytest.mark.parametrize(
    ("plan", "programs"),
    [
        (Plan(4, data=2, tensor=2, zero=3, microbatches=2, batch=8, sequence=False), True),
        (Plan(2, data=2, microbatches=2, batch=8, zero=3, gather_again=False), True),
        (Plan(2, data=2, microbatches=2, batch=8, recompute=ALL), True),
        (Plan(2, data=2, microbatches=2, batch=8, recompute=("blocks.1", "blocks.4")), False),
    ],
    ids=lambda value: value.name if isinstance(value, Plan) else "",
)
def test_programs_are_those_of_all_layers(
    plan: Plan, programs: bool, deep: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded: list[int] = []
    repeated: list[StageProgram] = []
    real, again = rewrite.shard_axes, rewrite.repeat_programs

    def noting(*args):  # type: ignore[no-untyped-def]
        repeated.append(again(*args))
        return repeated[-1]

    monkeypatch.setattr(rewrite, "repeat_programs", noting)

    def counting(graph, step, *rest):  # type: ignore[no-untyped-def]
        sharded.append(len(step.blocks))
        return real(graph, step, *rest)

    monkeypatch.setattr(rewrite, "shard_axes", counting)
    few = build(deep, plan, sizes=deep.sizes)
    assert sharded == [3, 4]
    assert bool(repeated) == programs
    sharded.clear()
    whole = build(replace(deep, repeats=None, derived={}), plan, sizes=deep.sizes)
    assert sharded == [LAYERS]
    assert texts(few) == texts(whole)
    assert said(few) == said(whole)
    assert memory(few, plan) == memory(whole, plan)
