"""Casts of parameters made once a step: where they are, what they take and save, when chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.compiler.programs import build
from graphaccel.errors import BadPin
from graphaccel.ir.program import StageProgram
from graphaccel.ir.values import returned
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.read_pins import read_pins
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.branch_and_bound import seconds
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import shapes
from graphaccel.planner.search.solve import Problem, with_cuts_and_blocks
from graphaccel.report.text import plan_report
from tests.planner.estimate.test_footprint import problem_of
from tests.support.zoo import ALL

CAST = torch.ops.aten._to_copy.default
Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


def plan_of(precision: str, **decided: Any) -> Plan:
    return Plan(1, batch=8, precision=PRECISIONS[precision]).decided(**decided)


def stage_of(step: StepGraph, precision: str, **decided: Any) -> StageProgram:
    plan = plan_of(precision, **{"microbatches": 4, "cast_once": True, **decided})
    (stage,) = build(step, plan).stages
    return stage


def casts(stage: StageProgram) -> set[str]:
    """Parameters that a microbatch casts to 16 bits."""
    phases = [(stage.forward, stage.forward_inputs)]
    phases += [(graph, stage.backward_inputs) for graph in stage.backwards.values()]
    return {
        value.name
        for graph, values in phases
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), values, strict=True)
        if value.kind == "parameter"
        for user in node.users
        if user.target is CAST
    }


@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp16"])
def test_each_parameter_is_cast_once_a_step(captured: Captured, precision: str) -> None:
    step = captured("gpt")
    before = stage_of(step, precision, cast_once=False)
    stage = stage_of(step, precision)
    assert before.prepare is None
    assert stage.prepare is not None
    assert not casts(stage)
    assert {v.name for v in stage.prepare_outputs} == casts(before)
    made = [n for n in stage.prepare.graph.nodes if n.op == "call_function"]
    assert {n.target for n in made} == {CAST}
    assert returned(stage.prepare) == made
    assert {n.meta["val"].dtype for n in made} == {getattr(torch, PRECISIONS[precision].compute)}
    assert [v.kind for v in stage.prepare_inputs] == ["parameter"] * len(made)
    wide = {v.name for v in stage.forward_inputs if v.kind == "parameter"}
    low = {v.name for v in stage.forward_inputs if v.kind == "held"}
    assert wide | low == set(stage.parameters)
    # under autocast an embedding is read in float32, and the head that is tied to it in 16 bits
    both = {"token.weight"} if precision != "bf16-params" else set()
    assert wide & low == both


class OneProduct(torch.nn.Module):
    """`forward(x)`: x [B, 8] → scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight).tanh().sum()


def text_of(graph: fx.GraphModule) -> list[str]:
    return [
        f"%{n.name}: {str(n.meta['val'].dtype).removeprefix('torch.')}{list(n.meta['val'].shape)}"
        f" = {n.target if n.op == 'call_function' else 'input'}"
        for n in graph.graph.nodes
        if n.op != "output"
    ]


def test_the_text_of_the_graphs() -> None:
    step = capture(OneProduct(), flatten_call(*as_call(torch.randn(8, 8))))
    stage = stage_of(step, "bf16", microbatches=2)
    assert stage.prepare is not None
    assert text_of(stage.prepare) == [
        "%p_weight: float32[4, 8] = input",
        "%low: bfloat16[4, 8] = aten._to_copy.default",
    ]
    assert text_of(stage.forward)[0] == "%p_weight: bfloat16[4, 8] = input"
    assert sum(" = aten._to_copy" in line for line in text_of(stage.forward)) == 2  # batch and loss


def problem_for(step: StepGraph, plan: Plan, cluster: Cluster) -> Problem:
    return problem_of(lower_precision(step, plan), cluster)


@pytest.mark.parametrize(
    ("name", "decided"),
    [
        ("gpt", {"microbatches": 4}),
        ("gpt", {"microbatches": 2, "data": 2, "zero": 1}),
        ("llama", {"microbatches": 2, "tensor": 2}),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_what_is_held_is_predicted(
    name: str, decided: dict[str, Any], precision: str, captured: Captured, made_up: MadeUp
) -> None:
    """The closed form and the programs grow by the same bytes, 2 for each number that is cast."""
    step = captured(name)
    module, batch, loss_fn = ALL[name].build()
    found = []
    for once in (False, True):
        plan = plan_of(precision, cast_once=once, pinned=("cast_once",), **decided)
        plan = replace(plan, devices=plan.data * plan.tensor)
        cluster = made_up(plan.devices, 1 << 20)
        plan = with_cuts_and_blocks(problem_for(step, plan, cluster), plan, "none", None)
        compiler = Compiler(Model(module, loss_fn, 2.0), cluster, {})
        exact, program = compiler.refine(step, plan, as_batch(batch), step.sizes)
        assert plan.prediction is not None
        assert exact.prediction is not None
        (guess,), (real,) = plan.prediction.memory, exact.prediction.memory
        found.append((guess.parameter, real.parameter, seconds(plan)))
    (stage,) = program.stages
    assert stage.prepare is not None
    numbers = sum(n.meta["val"].numel() for n in returned(stage.prepare))
    assert found[1][0] - found[0][0] == found[1][1] - found[0][1] == 2 * numbers
    assert found[1][2] < found[0][2]


def test_it_is_chosen_where_it_is_faster_and_fits(captured: Captured, made_up: MadeUp) -> None:
    step = captured("gpt")

    def solved(kib: int = 1 << 20, **decided: Any) -> Plan:
        plan = plan_of(decided.pop("precision", "bf16"), **decided)
        plan = replace(plan, devices=plan.data)
        where = made_up(plan.devices, kib)
        return with_cuts_and_blocks(problem_for(step, plan, where), plan, "none", None)

    many = solved(microbatches=4)
    assert many.holds_casts
    assert "bfloat16, cast once a step" in plan_name(many)
    assert not solved(microbatches=4, pinned=("cast_once",)).cast_once
    assert not solved(microbatches=1).cast_once
    assert not solved(microbatches=4, precision="fp32").cast_once
    assert not solved(microbatches=2, data=2, zero=3).cast_once
    assert solved(microbatches=2, data=2, zero=1).cast_once
    each = solved(microbatches=4, pinned=("cast_once",))
    assert each.prediction is not None
    assert many.prediction is not None
    between = (each.prediction.memory[0].peak + many.prediction.memory[0].peak) // 2
    assert not solved(kib=between >> 10, microbatches=4).cast_once


def test_no_bound_is_above_what_holds_casts(captured: Captured, made_up: MadeUp) -> None:
    plan = plan_of("bf16-params", pinned=("precision",))
    plan, cluster = replace(plan, devices=4), made_up(4, 1 << 20)
    problem = problem_for(captured("gpt"), plan, cluster)
    pins = Pins(precision="bf16-params", recompute="none", tensor=1, context=1, expert=1)
    found = [s for s in shapes(problem, pins, 8) if s.layout.model_parallel_size == 1]
    least = Bounds(problem, plan).seconds(columns(found, 8))
    held = 0
    for shape, bound in zip(found, least.tolist(), strict=True):
        if shape.pipeline * shape.interleave > 8:
            continue
        solved = with_cuts_and_blocks(problem, shape.on(plan), "none", None)
        held += solved.holds_casts
        assert bound <= seconds(solved) * (1 + 1e-9), shape
    assert held > 10


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        ({"cast_once": "yes"}, "it is true or false"),
        ({"cast_once": True}, "with precision=fp32 no parameter is cast"),
        (
            {"cast_once": True, "precision": "bf16", "zero": 3},
            "with zero=3 parameters are gathered; reshard_after_forward='once_per_step' "
            "does it once a step",
        ),
    ],
)
def test_pins_that_can_not_be(pins: dict[str, object], told: str, captured: Captured) -> None:
    with pytest.raises(BadPin) as caught:
        read_pins(pins, captured("gpt"), 2, 8, Limits())
    assert caught.value.reason == told


def test_a_pin_leaves_zero_3_out(captured: Captured, made_up: MadeUp) -> None:
    problem = problem_of(captured("gpt"), made_up(4))
    pins = Pins(cast_once=True, precision="bf16")
    assert {s.zero for s in shapes(problem, pins, 8)} == {0, 1, 2}


def test_the_report_says_it(captured: Captured, made_up: MadeUp) -> None:
    step = captured("gpt")
    plan = plan_of("bf16", microbatches=4, cast_once=True)
    problem = problem_for(step, plan, made_up(1, 1 << 20))
    plan = with_cuts_and_blocks(problem, plan, "none", None)
    text = plan_report(
        plan, step, problem.cluster, model_name="gpt", assumed="", layouts=problem.layouts
    )
    said = "  parameters cast to bfloat16 once a step, and held so for 4 microbatches"
    assert said in text.splitlines()
