"""What reports say of how far a prediction is to be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel.planner.cluster import Cluster, OpTime, cluster
from graphaccel.report.certainty import Calibration, calibration_of, room
from graphaccel.report.explanation import answer_lines
from graphaccel.report.facts import Facts
from graphaccel.report.html import html_page
from graphaccel.report.text import facts_text

GIB = 2**30


def test_room_on_a_device() -> None:
    where = cluster("h100-80gb", 8, memory=80 * GIB)  # 1.5 GiB of context, 7 % fragmentation
    assert room(60 * GIB, where).reason == "also where the allocator wastes 7%"
    likely = room(75 * GIB, where)
    assert (likely.verdict, likely.reason) == (
        "likely",
        "where the allocator wastes 3.5% or less, not 7%",
    )
    risky = room(78 * GIB, where)
    assert risky.verdict == "risky"
    assert risky.reason == "tensors alone take 78.0 GiB, the context leaves 78.5 GiB"
    assert room(81 * GIB, where).reason == "tensors alone are 1.0 GiB more than the device has"


def test_where_rates_are_from() -> None:
    known = cluster("h100-80gb", 16, memory=40 * GIB)
    assert calibration_of(known) == Calibration(0, "catalogue figures, not measured")
    other = replace(known, device=replace(known.device, memory_bandwidth=1e12))
    given = Calibration(0, "figures given for the cluster, not measured here")
    assert calibration_of(other) == given
    linked = replace(known, links=(replace(known.links[0], bandwidth=1e9), known.links[1]))
    assert calibration_of(linked) == given
    measured = replace(known, device=replace(known.device, measured=(OpTime("aten.add"),) * 3))
    assert calibration_of(measured) == Calibration(1, "3 calls measured on this kind", 3)


def test_reports_say_both(facts: Facts) -> None:
    assert facts.room is not None
    assert facts.calibration is not None
    text = facts_text(facts)
    said = f"{facts.room.verdict}: {facts.room.reason}"
    assert f" free; {said}\n" in text
    assert f"\n  calibration level 0: {facts.calibration.source}\n" in text
    again = Facts.from_json(facts.to_json())
    assert (again.room, again.calibration) == (facts.room, facts.calibration)
    page = html_page(facts).split('<section id="text">')[0]
    assert said in page
    assert f"{facts.calibration.source} (calibration level 0)" in page


@pytest.mark.parametrize(("part", "verdict"), [(0.97, "likely"), (1.5, "impossible")])
def test_a_plan_that_does_not_fit_may_run_all_the_same(
    facts: Facts, made_up: Callable[..., Cluster], part: float, verdict: str
) -> None:
    from graphaccel.planner.whatif import Answer

    where = made_up(4)
    tensors = int(where.device.memory * part)
    other = int(tensors * where.fragmentation)
    parts = {"activation": tensors, "other": other}
    answer = Answer(
        "data=1",
        "does not fit",
        "does not fit by much",
        "data 1",
        1.0,
        {},
        {},
        tensors + other,
        0,
        parts,
    )
    assert f"  {verdict} to run all the same: " in "\n".join(
        answer_lines(answer, facts.plan, where)
    )
