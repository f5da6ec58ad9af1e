"""Building the programs of the best plans has the last word on what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel import errors
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.search.reasons import kind_of, seconds
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
    """Corrected by as much, none would fit: the fastest plan of another kind is built."""
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
    assert kind_of(built[0]) != kind_of(built[1])
    assert "gap at most" in plan.certificate  # the ones between were faster, and were not built
    assert plan.decided(notes=()) == built[1].decided(notes=())


@pytest.mark.parametrize("times", [1.5, 1000.0])
def test_plans_of_one_kind_that_turn_out_larger_do_not_rule_out_another(
    captured: Captured, made_up: MadeUp, times: float
) -> None:
    """The plan is as fast as the fastest that can be pinned, and not among those left out."""
    first: list[tuple[int, ...]] = []

    def refine(plan: Plan) -> Plan:
        assert plan.prediction is not None
        first.append(kind_of(plan))
        wrong = times if kind_of(plan) == first[0] else 1.0
        memory = tuple(replace(m, peak=int(wrong * m.peak)) for m in plan.prediction.memory)
        return replace(plan, prediction=replace(plan.prediction, memory=memory))

    def planned(**pins: object) -> Plan:
        asked = {"optimizer_bytes": 8, "refine": refine}
        return search(captured("gpt"), made_up(2, 1200), pins=pins, **asked)

    plan = planned()
    pinned = []
    for data, zero in ((1, 0), (2, 0), (2, 2), (2, 3)):
        try:
            pinned.append(seconds(planned(data=data, zero=zero)))
        except errors.InfeasiblePlan:
            assert (data, 1, 1, 1, 1, zero) == first[0]
    assert len(pinned) >= 3
    assert seconds(plan) <= min(pinned)
    assert not any(note.startswith(f"{plan_name(plan)}:") for note in plan.notes)
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
