"""The report on one screen, and what it says of precision and throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, SEQUENCE
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.prediction import Alternative
from graphaccel.planner.profile.cost import Sizes, step_flops
from graphaccel.planner.search.search import Conditions, search
from graphaccel.report.brief import SCREEN, brief_text
from graphaccel.report.facts import Facts, gather
from graphaccel.report.throughput import number_text, precision_line, throughput_of

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


@pytest.fixture
def deep(captured: Captured, made_up: MadeUp) -> Facts:
    """Facts of a pipeline of 4, with everything that takes lines."""
    step, where = captured("gpt"), made_up(8)
    pins = {"pipeline": 4, "interleave": 1, "recompute": "all"}
    plan = search(step, where, pins=pins, optimizer_bytes=8)
    meshes = [(d, axis) for axis in ("tensor", "pipeline") for d in (1, 2, 4)]
    names = [f"data {d} x {axis} {8 // d} · {d} microbatches of 1" for d, axis in meshes]
    others = tuple(Alternative(name, 1.0, 1 << 30, "50% slower: compute +1 s") for name in names)
    plan = replace(plan, alternatives=others, notes=("what was left out " * 40,) * 6)
    return gather(plan, step, where, model_name="gpt", assumed="AdamW")


def test_the_report_is_one_screen(deep: Facts) -> None:
    lines = brief_text(deep).splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 110
    assert lines[0] == "precision float32 as your script has it"
    assert any(line.startswith("TIME") for line in lines)
    assert "--explain" in lines[-1]
    shown = [line for line in lines if "50% slower" in line]
    meshes = ("data 1 x tensor 8", "data 2 x tensor 4", "data 1 x pipeline 8")  # one of each kind
    assert len(shown) == len(meshes)
    assert all(mesh in line for mesh, line in zip(meshes, shown, strict=True))


def test_utilisation_is_the_formula_that_is_named(deep: Facts) -> None:
    told, seconds = deep.throughput, deep.prediction.seconds
    assert told is not None
    used = told.flops / (seconds * 8 * 1e10)
    assert f"MFU {used:.1%} = FLOPs of forward and backward" in brief_text(deep)
    rate = deep.plan.batch * 16 / seconds
    assert f"{number_text(rate)} tokens/s ({number_text(rate / 8)} a device)" in brief_text(deep)


def test_flops_are_those_of_the_model_at_the_plan_s_batch(
    captured: Captured, made_up: MadeUp
) -> None:
    step, where = captured("gpt"), made_up(2)
    plan = search(step, where, pins={"data": 2}, optimizer_bytes=8, conditions=Conditions(batch=32))
    sizes = Sizes({BATCH: 32, SEQUENCE: step.sizes[SEQUENCE]})
    assert throughput_of(step, plan, where).flops == sizes(step_flops(step.graph.graph))


def test_the_precision_is_said(captured: Captured, made_up: MadeUp) -> None:
    step, where = captured("gpt"), made_up(1)
    plan = search(step, where, pins={}, optimizer_bytes=8)
    told = throughput_of(step, plan, where)
    assert precision_line(plan, replace(told, faster=9.84)) == (
        "precision float32 as your script has it: bf16 would be 9.8 x faster "
        "(--precision bf16; changes numerics)"
    )
    pinned = replace(plan, pinned=("precision",))
    assert precision_line(pinned, told) == "precision float32, as pinned (every op)"
    auto = precision_line(replace(plan, precision=PRECISIONS["bf16"]), told)
    assert "the fastest of --precision auto" in auto


@pytest.mark.parametrize(
    ("number", "text"),
    [(989e12, "989 T"), (1250.0, "1.25 k"), (42.0, "42.0"), (0.5, "0.50"), (999_999.0, "1.00 M")],
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert number_text(number) == text
