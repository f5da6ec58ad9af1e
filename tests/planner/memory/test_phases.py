"""What the optimizer's step needs is part of the peak, of what fits, and of reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graphaccel.capture.batch import Batch
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.errors import InfeasiblePlan
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory
from graphaccel.planner.memory.phases import STEP
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Phases
from graphaccel.report.phases import misfits
from graphaccel.report.text import plan_report
from tests.support.gpt import GPT

COPY = OptimizerMemory(together=1.0)
MadeUp = Callable[..., Cluster]


def _compiler(where: Cluster, step_memory: OptimizerMemory) -> Compiler:
    """Many parameters, few tokens: after the backward there is next to nothing beside gradients."""
    torch.manual_seed(0)
    pins = {"zero": 0, "compile": "off", "fusions": "off"}  # a fused step allocates nothing
    return Compiler(Model(GPT(layers=2, width=128), None, 2.0, True, step_memory), where, pins)


def _chosen(where: Cluster, step_memory: OptimizerMemory) -> tuple[Compiler, Plan]:
    compiler = _compiler(where, step_memory)
    plan = compiler.choose(_batch()).plan
    return compiler, plan


def test_the_step_is_the_peak_where_it_makes_most(made_up: MadeUp) -> None:
    where = made_up(1)
    without, plain = _chosen(where, NOTHING)
    _, copied = _chosen(where, COPY)
    assert plain.prediction is not None
    assert copied.prediction is not None
    (before,), (after,) = plain.prediction.memory, copied.prediction.memory
    assert before.phases is not None
    assert after.phases is not None
    assert before.at != STEP
    assert after.at == STEP
    assert after.tensors == after.phases.step > after.phases.later == before.tensors
    assert sum(after.parts.values()) == after.peak
    trained = sum(p.numel() * 4 for p in without.model.module.parameters())
    assert after.phases.step - before.phases.step == trained
    assert after.phases.forward < after.phases.later
    again = Plan.from_json(copied.to_json())
    assert again == copied


def _batch() -> Batch:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    return as_batch({"input_ids": ids, "labels": ids})


def test_a_plan_without_room_for_the_step_does_not_fit(made_up: MadeUp) -> None:
    where = made_up(1)
    _, plan = _chosen(where, COPY)
    assert plan.prediction is not None
    (memory,) = plan.prediction.memory
    assert memory.phases is not None
    between = (memory.phases.later + memory.phases.step) // 2
    tight = replace(where, device=replace(where.device, memory=int(between * 1.05)))
    _chosen(tight, NOTHING)
    with pytest.raises(InfeasiblePlan):
        _chosen(tight, COPY)
    assert tight.verdict(memory.tensors) != "safe"


def test_reports_say_the_phases(made_up: MadeUp) -> None:
    where = made_up(1)
    compiler, plan = _chosen(where, COPY)
    step, _ = compiler.capture(_batch())
    text = plan_report(plan, step, where, model_name="gpt", assumed="AdamW")
    assert f"  peak at: rank 0, {STEP}\n" in text
    said = " ".join(text.split())
    assert "rank 0 by phase, MiB of tensors: load " in said
    assert "(built with weights" in said
    assert "· optimizer's step " in said
    assert "(full_state_dict " in said


def test_what_does_not_fit_of_loading_and_saving(made_up: MadeUp) -> None:
    where = made_up(1, 1)  # of 1 KiB
    roomy = Phases(*[100] * 8)
    assert misfits(roomy, where) == []
    found = misfits(replace(roomy, load_built=2000, save_whole=2000), where)
    assert [line.split(" ")[0] for line in found] == ["a", "full_state_dict"]
    assert "graphaccel.deferred" in found[0]
