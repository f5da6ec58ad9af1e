"""Building the programs of the best plans has the last word on what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel import errors
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.search import search

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


def peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(m.peak for m in plan.prediction.memory)


def test_refine_has_the_last_word(captured: Captured, made_up: MadeUp) -> None:
    """Real memory a third above the estimate: the plan chosen fits it all the same."""
    cluster = made_up(1, 1500)
    seen: list[Plan] = []

    def refine(plan: Plan) -> Plan:
        seen.append(plan)
        assert plan.prediction is not None
        memory = tuple(
            replace(m, temporary=m.temporary + m.tensors // 3, peak=m.peak + m.tensors // 3)
            for m in plan.prediction.memory
        )
        return replace(plan, prediction=replace(plan.prediction, memory=memory))

    step = captured("gpt")
    guessed = search(step, cluster, pins={}, optimizer_bytes=8)
    plan = search(step, cluster, pins={}, optimizer_bytes=8, refine=refine)
    assert peak(plan) <= cluster.device.memory
    assert peak(plan) > peak(guessed) * 2 // 3
    assert seen[-1].decided(notes=()) == plan.decided(notes=())
    assert len({p.decided() for p in seen}) == len(seen)  # nothing is built twice
    assert any("does not fit once built" in note for note in plan.notes)


def test_an_estimate_that_is_wrong_for_one_plan_only(captured: Captured, made_up: MadeUp) -> None:
    """Corrected by as much, none would fit: those that were thought to need least are built."""
    built: list[Plan] = []

    def refine(plan: Plan) -> Plan:
        built.append(plan)
        assert plan.prediction is not None
        wrong = 1000 if len(built) == 1 else 1
        memory = tuple(
            replace(m, activation=wrong * m.activation, peak=m.peak + (wrong - 1) * m.activation)
            for m in plan.prediction.memory
        )
        return replace(plan, prediction=replace(plan.prediction, memory=memory))

    plan = search(captured("gpt"), made_up(2), pins={}, optimizer_bytes=8, refine=refine)
    assert len(built) == 2
    assert "gap at most" in plan.certificate  # the ones between were faster, and were not built
    assert plan.decided(notes=()) == built[1].decided(notes=())
    assert any("does not fit once built" in note for note in plan.notes)


def refusing(error: Exception, unless: Callable[[Plan], bool]) -> Callable[[Plan], Plan]:
    def refine(plan: Plan) -> Plan:
        if unless(plan):
            return plan
        raise error

    return refine


def test_a_plan_that_can_not_be_built_is_passed_over(captured: Captured, made_up: MadeUp) -> None:
    error = errors.SplitRefused(axis="data", op="sort", module="", reason="rows are compared")
    plan = search(
        captured("gpt"),
        made_up(2),
        pins={},
        optimizer_bytes=8,
        refine=refusing(error, lambda plan: plan.data == 1),
    )
    assert plan.data == 1
    assert any("needs the whole batch" in note for note in plan.notes)


def test_when_every_plan_is_refused_the_reason_is_raised(
    captured: Captured, made_up: MadeUp
) -> None:
    error = errors.SplitRefused(axis="data", op="sort", module="", reason="rows are compared")
    with pytest.raises(errors.SplitRefused) as caught:
        search(
            captured("gpt"),
            made_up(2),
            pins={"data": 2},
            optimizer_bytes=8,
            refine=refusing(error, lambda plan: False),
        )
    assert caught.value is error
