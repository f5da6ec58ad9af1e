"""More devices, or larger ones, as an error or explanation names them: they are what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import InfeasiblePlan
from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster, Device, Host, Link, parse_bytes
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.search.reasons import as_corrected, rounded_up, wider_cluster
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search import search

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


@pytest.mark.parametrize("name", ["h100-80gb", "rtx4090-24gb", "cpu"])
@pytest.mark.parametrize("count", [4, 8])
def test_more_devices_of_the_catalogue_are_linked_as_it_has_them(name: str, count: int) -> None:
    found, said = wider_cluster(cluster(name, count), 2)
    assert found == cluster(name, 2 * count)
    assert said == f"{2 * count} devices"


def test_what_differs_from_the_catalogue_stays() -> None:
    less = cluster("h100-80gb", 8, memory=5 << 30)
    assert wider_cluster(less, 2)[0] == cluster("h100-80gb", 16, memory=5 << 30)
    host = Host(1 << 30, 1e9, 1e9)
    found, _ = wider_cluster(replace(less, host=host), 2)
    assert found.host == host
    assert [link.size for link in found.links] == [8, 16]


def test_links_that_are_taken_to_reach_all_are_said_to_be(made_up: MadeUp) -> None:
    assert wider_cluster(made_up(4), 2)[1] == "8 devices"
    found, said = wider_cluster(made_up(64), 2)
    assert said == "128 devices, if outer reaches them all"
    assert [link.size for link in found.links] == [4, 128]
    own = replace(cluster("h100-80gb", 8), links=(Link("switch", 1e-6, 1e9, 8),))
    assert wider_cluster(own, 2)[1] == "16 devices, if switch reaches them all"


def test_estimates_that_were_too_low_are_so_for_more_devices() -> None:
    asked = cluster("h100-80gb", 8)
    context = asked.context_bytes
    half = context + (asked.device.memory - context) // 2
    corrected = replace(asked, device=replace(asked.device, memory=half))
    wider = cluster("h100-80gb", 16)
    assert as_corrected(wider, asked, corrected).device.memory == pytest.approx(half, abs=1)
    assert as_corrected(wider, asked, asked) == wider


@pytest.mark.parametrize(
    "count", [1, 103, 1024, 104_858, 10**6, 4_845_867_213, 80 << 30, 2**34 + 1]
)
def test_sizes_are_rounded_up_to_what_can_be_typed(count: int) -> None:
    found = rounded_up(count)
    assert parse_bytes(format_bytes(found)) == found >= count


def larger(times: float) -> Callable[[Plan], Plan]:
    """Plans that are larger once built."""

    def refine(plan: Plan) -> Plan:
        assert plan.prediction is not None
        memory = tuple(replace(m, peak=int(times * m.peak)) for m in plan.prediction.memory)
        return replace(plan, prediction=replace(plan.prediction, memory=memory))

    return refine


@pytest.mark.parametrize("times", [1.0, 1.3])
@pytest.mark.parametrize("pins", [{}, {"microbatches": 1, "recompute": "none"}])
def test_devices_of_the_memory_that_is_named_are_enough(
    captured: Captured, made_up: MadeUp, times: float, pins: dict[str, object]
) -> None:
    def planned(where: Cluster) -> Plan:
        return search(captured("gpt"), where, pins=pins, optimizer_bytes=8, refine=larger(times))

    with pytest.raises(InfeasiblePlan) as refused:
        planned(made_up(2, 300))
    named = [change for change, _ in refused.value.relaxations if change.startswith("devices of ")]
    (change,) = named
    memory = parse_bytes(change.removeprefix("devices of "))
    where = made_up(2, 300)
    plan = planned(replace(where, device=replace(where.device, memory=memory)))
    assert plan.prediction is not None
    (effect,) = [effect for name, effect in refused.value.relaxations if name == change]
    assert effect.startswith(f"peak {format_bytes(max(m.peak for m in plan.prediction.memory))}, ")


def test_hosts_of_the_memory_that_is_named_are_enough(captured: Captured, made_up: MadeUp) -> None:
    where = replace(made_up(1, 16 * 1024), host=Host(1 << 10, 1e9, 1e9))

    def planned(on: Cluster) -> Plan:
        pins = {"offload": "optimizer"}
        return search(captured("gpt"), on, pins=pins, optimizer_bytes=8)

    with pytest.raises(InfeasiblePlan) as refused:
        planned(where)
    found = [re.fullmatch("hosts of (.*) for each device", c) for c, _ in refused.value.relaxations]
    (match,) = [m for m in found if m]
    assert where.host is not None
    assert planned(replace(where, host=replace(where.host, memory=parse_bytes(match[1]))))


def test_what_was_built_and_refused_is_not_shown_after_ctrl_c(
    captured: Captured, made_up: MadeUp
) -> None:
    record, built = Record(), []

    def refine(plan: Plan) -> Plan:
        built.append(plan)
        return larger(1000 if len(built) == 1 else 0.9)(plan)

    plan = search(
        captured("gpt"), made_up(2), pins={}, optimizer_bytes=8, refine=refine, record=record
    )
    assert built[0].decided() in record.refused
    best = record.incumbent()
    assert best is not None
    assert best.decided(notes=()) not in record.refused
    assert plan.decided() not in record.refused


def test_a_mesh_that_was_refused_is_said_to_be(captured: Captured, made_up: MadeUp) -> None:
    """And one that is as fast and fits is not said to be too big."""
    built: list[Plan] = []

    def refine(plan: Plan) -> Plan:
        built.append(plan)
        return larger(1000 if plan.data == 2 else 0.9)(plan)

    plan = search(captured("gpt"), made_up(2), pins={"zero": 0}, optimizer_bytes=8, refine=refine)
    reasons = {other.name: other.reason for other in plan.alternatives}
    assert built[0].data == 2
    assert reasons[plan_name(built[0])] == "was built, and does not fit or can not run"
    free = Device("free", 1 << 30, {"float32": 1e30}, 1e30, 0.0)
    where = Cluster(free, 2, (Link("wire", 0.0, 1e30, 2),), 0, 0.05)
    tied = search(captured("gpt"), where, pins={}, optimizer_bytes=8)
    assert tied.alternatives
    assert not [other.reason for other in tied.alternatives if "fit" in other.reason]
