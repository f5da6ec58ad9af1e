"""Why not, what would help, how sure: every figure is that of another search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.planner.cluster.cluster import COLLECTIVES, Cluster, Collective
from graphaccel.planner.estimate.estimate import predict_seconds
from graphaccel.planner.explain.answers import Explanation
from graphaccel.planner.explain.what_if import explain, why_not
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search import search
from graphaccel.report.explanation import answer_lines, explanation_lines
from tests.planner.searches import decisions_alone

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]
Golden = Callable[[str, str], None]


PINS = {"zero": 0, "interleave": 1, "scatter_sends": False}
"""Without ZeRO memory has much to say; the others leave few plans to try."""


def run(step: StepGraph, where: Cluster, **pins: Any) -> tuple[Plan, Record]:
    record, pins = Record(), {**PINS, **pins}
    return search(step, where, pins=pins, optimizer_bytes=8, record=record), record


def seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.seconds


@pytest.fixture(scope="module")
def explained(captured: Captured, made_up: MadeUp) -> tuple[Plan, Record, Explanation]:
    """The zoo's gpt on four devices with room for little."""
    plan, record = run(captured("gpt"), made_up(4, 1000))
    return plan, record, explain(record, plan)


def test_each_other_value_is_the_best_plan_with_it(
    captured: Captured, made_up: MadeUp, explained: tuple[Plan, Record, Explanation]
) -> None:
    plan, _, why = explained
    assert {d.name for d in why.decisions} >= {"data", "pipeline", "microbatches", "recompute"}
    for decision in why.decisions:
        assert decision.value not in {c.value for c in decision.others}
        for choice in decision.others:
            if choice.seconds is None:
                assert "not fit" in choice.reason or "can not be" in choice.reason
            elif decision.name not in ("precision", "zero"):  # pinned, or not of the same numbers
                assert choice.seconds >= seconds(plan)
        planned = sorted((c for c in decision.others if c.seconds), key=lambda c: c.seconds or 0)
        for choice in planned[:1]:
            value = int(choice.value) if choice.value.isdecimal() else choice.value
            again, _ = run(captured("gpt"), made_up(4, 1000), **{decision.name: value})
            assert seconds(again) == choice.seconds


def test_prices_are_those_of_the_changed_cluster(
    captured: Captured, made_up: MadeUp, explained: tuple[Plan, Record, Explanation]
) -> None:
    plan, _, why = explained
    prices = {price.change: price for price in why.prices}
    assert {"+100.0 KiB per device", "2x FLOP/s", "2x inner bandwidth", "8 devices"} <= set(prices)
    assert "2x outer bandwidth" not in prices  # four devices never use it
    more, _ = run(captured("gpt"), made_up(4, 1100))
    assert prices["+100.0 KiB per device"].seconds == seconds(more)
    assert prices["+100.0 KiB per device"].gain == pytest.approx(1 - seconds(more) / seconds(plan))
    wider, _ = run(captured("gpt"), made_up(8, 1000))
    assert prices["8 devices"].seconds == seconds(wider)
    helping = [
        p.gain for p in why.prices if p.change.startswith(("+", "2x")) and p.gain is not None
    ]
    assert min(helping) >= -1e-12  # more of anything never makes the best plan slower


def test_a_faster_link_has_faster_collectives(captured: Captured, made_up: MadeUp) -> None:
    def calibrated(factor: float) -> Cluster:
        where = made_up(4, 10**6)
        inner, *outer = where.links
        rows = tuple(Collective(name, 1e-6, 1e8 * factor) for name in COLLECTIVES)
        inner = replace(inner, bandwidth=inner.bandwidth * factor, measured=rows)
        return replace(where, links=(inner, *outer))

    pins = {"data": 4, "zero": 2}
    plan, record = run(captured("gpt"), calibrated(1), **pins)
    price = next(p for p in explain(record, plan).prices if p.change == "2x inner bandwidth")
    better, _ = run(captured("gpt"), calibrated(2), **pins)
    assert price.seconds == seconds(better) < seconds(plan)


def test_regret_is_measured_against_the_best_plan_of_the_other_calibration(
    captured: Captured, made_up: MadeUp, explained: tuple[Plan, Record, Explanation]
) -> None:
    plan, record, why = explained
    assert {s.factor for s in why.shifts} == {0.9, 1.1}
    assert record.problem is not None
    for shift in why.shifts:
        assert shift.regret >= 0
        if shift.rate != "FLOP/s":
            continue
        where = made_up(4, 1000)
        flops = {k: v * shift.factor for k, v in where.device.peak_flops.items()}
        other = replace(where, device=replace(where.device, peak_flops=flops))
        best, _ = run(captured("gpt"), other)
        mine = predict_seconds(record.problem.profile, plan, other, 8).seconds
        assert shift.regret == pytest.approx(max(0.0, mine / seconds(best) - 1))


def test_explanation_text(golden: Golden, explained: tuple[Plan, Record, Explanation]) -> None:
    plan, _, why = explained
    lines = explanation_lines(why, plan)
    assert max(map(len, lines)) <= 110
    golden("explain-gpt", "\n".join(lines) + "\n")


def test_why_not_text(
    golden: Golden, made_up: MadeUp, explained: tuple[Plan, Record, Explanation]
) -> None:
    plan, record, _ = explained
    asked: list[dict[str, Any]] = [
        {"pipeline": 1},
        {"pipeline": 4, "microbatches": 2},
        {"data": 4, "microbatches": 1, "recompute": "none"},
        {"data": 3},
        {"microbatches": 16},
    ]
    answers = [why_not(record, plan, pins) for pins in asked]
    told = (answer_lines(answer, plan, made_up(4, 1000)) for answer in answers)
    text = "\n\n".join("\n".join(lines) for lines in told) + "\n"
    assert max(map(len, text.splitlines())) <= 110
    golden("why-not-gpt", text)


def test_an_unknown_pin_is_answered_too(explained: tuple[Plan, Record, Explanation]) -> None:
    plan, record, _ = explained
    answer = why_not(record, plan, {"warp": 9})
    assert answer.verdict == "can not be"
    assert answer.reason.startswith("warp=9 can not be planned: known pins: data, ")


def test_values_that_can_be_are_said(explained: tuple[Plan, Record, Explanation]) -> None:
    plan, record, _ = explained
    answer = why_not(record, plan, {"recompute": "bogus"})
    assert answer.reason.endswith("unknown; it can be none, some, selective, all")


def test_a_plan_as_fast_fits_and_is_said_to_be_as_fast(
    explained: tuple[Plan, Record, Explanation],
) -> None:
    plan, record, _ = explained
    for asked in ({"fallback": "fx"}, {"cuda_graphs": False, "fallback": "fx"}):
        answer = why_not(record, plan, asked)
        assert answer.seconds == seconds(plan)
        assert (answer.verdict, answer.reason) == (
            "as fast",
            "as fast: ties go to the simpler plan",
        )


def test_a_faster_plan_is_said_to_be_faster_and_why_it_was_not_chosen(
    captured: Captured, made_up: MadeUp
) -> None:
    plan, record = run(captured("gpt"), made_up(4), data=1)
    other = why_not(record, plan, {"data": 4})
    assert other.seconds is not None
    assert other.seconds < seconds(plan)
    assert other.verdict == "faster"
    assert other.reason.endswith("% faster, but data pinned otherwise")
    low = why_not(record, plan, {"precision": "bf16"})  # whose graph is not made here
    assert low.verdict == "as fast"
    assert low.reason == "as fast, but changes numerics: only when pinned"


def test_what_graphs_are_made_for_is_planned_anew(
    explained: tuple[Plan, Record, Explanation],
) -> None:
    plan, record, _ = explained
    assert plan.prediction is not None
    for asked in ({"fusions": "auto"}, {"compile": "off"}):  # a plan for GPUs is compiled
        alone = why_not(record, plan, asked)
        assert alone.verdict == "can not be"
        assert "plan anew with it pinned" in alone.reason
    faster = replace(plan.prediction, seconds=seconds(plan) / 2)
    told: list[Any] = []

    def replan(pins: Mapping[str, object]) -> Plan:
        told.append(pins)
        return replace(plan, fusions=("gelu",), prediction=faster)

    answer = why_not(record, plan, {"fusions": "auto"}, replan)
    assert told == [{**PINS, "fusions": "auto"}]
    assert answer.seconds == seconds(plan) / 2
    assert answer.reason == "50% faster, but fusions only when pinned"


def test_the_chosen_plan_is_compared_with_itself_as_built(
    captured: Captured, made_up: MadeUp
) -> None:
    def refine(plan: Plan) -> Plan:
        assert plan.prediction is not None
        memory = tuple(replace(m, peak=m.peak - 7) for m in plan.prediction.memory)
        return replace(plan, prediction=replace(plan.prediction, memory=memory))

    record = Record()
    plan = search(
        captured("gpt"), made_up(2), pins={}, optimizer_bytes=8, refine=refine, record=record
    )
    asked = {
        "data": plan.data,
        "zero": plan.zero,
        "reshard_after_forward": plan.reshard_after_forward,
    }
    answer = why_not(record, plan, asked)
    assert plan.prediction is not None
    assert answer.verdict == "chosen"
    assert answer.peak == max(m.peak for m in plan.prediction.memory)


def test_what_was_chosen_is_said_to_be(explained: tuple[Plan, Record, Explanation]) -> None:
    plan, record, _ = explained
    answer = why_not(record, plan, {"data": plan.data, "microbatches": plan.microbatches})
    assert answer.verdict == "chosen"
    assert answer.seconds == seconds(plan)


def test_pins_stay_and_can_be_let_go(captured: Captured, made_up: MadeUp) -> None:
    plan, record = run(captured("gpt"), made_up(4), data=1)
    with decisions_alone():
        assert explain(record, plan).decisions[0].pinned
    asked = why_not(record, plan, {"recompute": "none"})
    assert asked.name.startswith("data 1 x pipeline 4")
    freed = why_not(record, plan, {"data": None})
    best, _ = run(captured("gpt"), made_up(4))
    assert freed.seconds == seconds(best)


def test_a_built_plan_has_the_last_word_on_memory(captured: Captured, made_up: MadeUp) -> None:
    where, built = made_up(1), []

    def refine(plan: Plan) -> Plan:
        built.append(plan)
        assert plan.prediction is not None
        memory = tuple(replace(m, peak=3 * m.peak) for m in plan.prediction.memory)
        return replace(plan, prediction=replace(plan.prediction, memory=memory))

    record = Record()
    plan = search(captured("gpt"), where, pins={}, optimizer_bytes=8, refine=refine, record=record)
    answer = why_not(record, plan, {"recompute": "all"})
    assert built[-1].recompute
    assert answer.peak is not None
    assert answer.peak % 3 == 0
    with pytest.raises(ValueError, match="of no search"):
        explain(Record(), plan)
