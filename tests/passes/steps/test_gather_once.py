"""Programs whose parameters are gathered once a step: how many collectives, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.programs import build
from graphaccel.compiler.schedules import schedule_of
from graphaccel.ir.program import StageProgram, StepProgram
from graphaccel.ir.values import returned
from graphaccel.planner.memory.exact_memory import rank_curve, rank_memory
from graphaccel.planner.memory.resident import Resident
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
TOGETHER = c10d.all_gather_into_tensor_coalesced.default
GATHERS = {TOGETHER, c10d.all_gather_into_tensor.default}
WAIT, SCATTER = c10d.wait_tensor.default, c10d.reduce_scatter_tensor.default
CAST = aten._to_copy.default
Captured = Callable[[str], StepGraph]


def _program(step: StepGraph, **decisions: Any) -> tuple[Plan, StepProgram]:
    plan = Plan(
        2, data=2, batch=step.batch_size, zero=3, reshard_after_forward="once_per_step", **decisions
    )
    return plan, build(step, plan)


def _stage(step: StepGraph, **decisions: Any) -> StageProgram:
    return _program(step, **decisions)[1].stages[0]


def _calls(graph: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.target in targets]


@pytest.mark.parametrize(("accumulation", "each"), [("whole", 0), ("shards", 7)])
def test_one_gather_a_group_and_step(captured: Captured, accumulation: str, each: int) -> None:
    stage = _stage(captured("gpt"), microbatches=4, accumulation=accumulation)
    assert stage.prepare is not None
    gathers = _calls(stage.prepare, *GATHERS)
    # blocks; position; norm; the tied weight once, though embedding and head read it
    assert len(gathers) == len(stage.groups) == 7
    assert {v.kind for v in stage.prepare_inputs} == {"shards"}
    assert sorted(v.name for v in stage.prepare_outputs) == sorted(stage.parameters)
    for graph in (stage.forward, *stage.backwards.values()):
        assert not _calls(graph, *GATHERS)
    found = {moment: len(_calls(g, SCATTER)) for moment, g in stage.backwards.items()}
    assert found == {(True, False): each, (False, False): each, (False, True): 7}


def test_gathers_are_all_issued_before_the_first_is_waited_for(captured: Captured) -> None:
    stage = _stage(captured("gpt"), microbatches=2)
    assert stage.prepare is not None
    assert not _calls(stage.prepare, WAIT)
    waits = _calls(stage.forward, WAIT)
    assert sorted(n.args[0].name for n in waits) == sorted(
        n.name for n, v in _inputs(stage.forward, stage.forward_inputs) if v.kind == "held"
    )
    # in the order of first use, a block at a time
    order = [v.name for v in stage.prepare_outputs]
    blocks = list(dict.fromkeys(n.split(".")[1] for n in order if n.startswith("blocks.")))
    assert blocks == ["0", "1", "2", "3"]
    assert order.index("token.weight") < order.index("blocks.0.norm_1.weight")
    places = {n: i for i, n in enumerate(stage.forward.graph.nodes)}
    last_block = [n for n in waits if n.meta["module"].startswith("blocks.3")]
    products = _calls(stage.forward, aten.addmm.default, aten.mm.default)
    assert any(places[p] < places[last_block[0]] for p in products)


def _inputs(graph: fx.GraphModule, values: Any) -> list[tuple[fx.Node, Any]]:
    return list(zip(graph.graph.find_nodes(op="placeholder"), values, strict=True))


def test_cast_once_where_every_read_casts(captured: Captured) -> None:
    """Under autocast norms read float32, so groups travel as they rest."""
    step = captured("gpt")
    for name, kinds in (("bf16", {torch.float32}), ("bf16-params", {torch.bfloat16})):
        stage = _stage(step, microbatches=2, precision=PRECISIONS[name])
        assert stage.prepare is not None
        assert {n.meta["val"].dtype for n in returned(stage.prepare)} == kinds
        casts = Counter(
            source.name
            for graph in (stage.forward, stage.backwards[True, False])
            for node in _calls(graph, CAST)
            for source in node.all_input_nodes
            if source.op == "placeholder" and source.name not in ("input_ids", "labels")
        )
        assert bool(casts) is (name == "bf16")
        assert len(_calls(stage.prepare, CAST)) == (0 if name == "bf16" else len(stage.groups))


def test_what_is_held_is_counted_until_the_last_backward(captured: Captured) -> None:
    step = captured("gpt")
    held = {}
    for precision in ("fp32", "bf16-params"):
        plan, program = _program(step, microbatches=2, precision=PRECISIONS[precision])
        (stage,) = program.stages
        held_bytes = dict.fromkeys(stage.parameters, 64)
        resident = Resident(held_bytes, {}, held_bytes, 100, 2.0)
        schedule = schedule_of(plan, program)
        spans = {
            (kind, 0, m): (2.0 * m + late, 2.0 * m + late + 1)
            for m in range(2)
            for late, kind in enumerate(("forward", "backward"))
        }
        memory = rank_memory(program, schedule, 0, resident)
        curve = rank_curve(program, schedule, 0, resident, spans)
        rest = 64 * len(stage.parameters)
        held[precision] = memory.parameter - rest
        assert curve[0].live["parameter"] == memory.parameter
        assert curve[-1].live["parameter"] == rest
        assert max(sample.total for sample in curve) == memory.peak
    numbers = sum(
        n.meta["val"].numel()
        for n, s in zip(step.graph.graph.find_nodes(op="placeholder"), step.inputs, strict=True)
        if s.kind == "parameter"
    )
    assert held == {"fp32": 4 * numbers, "bf16-params": 2 * numbers}


def test_evaluation_gathers_for_itself(captured: Captured) -> None:
    """A group at a time: nothing has to be held for a backward."""
    _, program = _program(captured("gpt"), microbatches=2)
    alone = Plan(2, batch=8, zero=3, reshard_after_forward="once_per_step")
    made = build(captured("gpt"), alone, gradients=False, groups=program.groups, ranks=2)
    (stage,) = made.stages
    assert stage.prepare is None
    assert len(_calls(stage.forward, *GATHERS)) == 8
