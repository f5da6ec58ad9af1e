"""What is kept on the host where a plan fits without, and memory makes that one slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.planner.cluster.cluster import Cluster, Host
from graphaccel.planner.explain.what_if import explain, why_not
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.capabilities import offered
from graphaccel.planner.search.offload_search import solve_as_needed
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search import search
from tests.planner.searches import decisions_alone

MadeUp = Callable[..., Cluster]
GIB = 2**30
FAST = Host(memory=GIB, memory_bandwidth=1e12, link=1e12)
CRAMPED = 40 * 1024  # KiB: enough for all of it, if most is computed again


class Heavy(nn.Module):
    """Of more parameters than it keeps of a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def heavy() -> StepGraph:
    return capture(Heavy(), flatten_call((torch.zeros(1024, 256),), {}))


def _find(step: StepGraph, where: Cluster, record: Record | None = None, **pins: Any) -> Plan:
    return search(step, where, pins=pins, optimizer_bytes=8, record=record)


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.seconds


def _where(made_up: MadeUp, kib: int = CRAMPED, host: Host | None = FAST) -> Cluster:
    return replace(made_up(1, kib), host=host)


def test_it_is_taken_where_memory_costs_much(heavy: StepGraph, made_up: MadeUp) -> None:
    without = _find(heavy, _where(made_up, host=None), microbatches=1)
    assert without.recompute
    record = Record()
    plan = _find(heavy, _where(made_up), record, microbatches=1)
    assert (plan.offload, plan.pinned) == (("optimizer",), ("microbatches",))
    assert _seconds(plan) <= _seconds(without) / 1.1
    took = f"{_seconds(without):.3g} s ({plan_name(without)})"
    assert f"optimizer on the host: without, the best takes {took}" in plan.notes
    # all that was solved is counted, and the explanation finds the same again
    assert record.outcome is not None
    tally = record.outcome.tally
    assert plan.certificate.startswith(f"{tally.candidates} candidates: {tally.solved} solved")
    assert tally.candidates > 3
    with decisions_alone():
        told = {item.name: item for item in explain(record, plan).decisions}
    assert told["offload"].value == "optimizer"


def test_what_speaks_against_copies_that_spare_little(heavy: StepGraph, made_up: MadeUp) -> None:
    record = Record()
    plan = _find(heavy, _where(made_up, CRAMPED * 11 // 10), record, microbatches=1)
    assert not plan.offload
    answer = why_not(record, plan, {"offload": "optimizer"})
    assert answer.verdict == "faster"
    assert answer.reason.endswith("but copies to the host must make a step 10% shorter")


@pytest.mark.parametrize(
    ("kib", "host"),
    [
        (CRAMPED, replace(FAST, link=1e6)),  # copies take longer than they spare
        (CRAMPED, replace(FAST, shared=True)),  # one memory for both
        (CRAMPED * 6 // 5, FAST),  # little is computed again
        (CRAMPED * 4, FAST),  # nothing is
    ],
    ids=["slow", "shared", "roomy", "wide"],
)
def test_it_is_not_taken_where_it_does_not_pay(
    heavy: StepGraph, made_up: MadeUp, kib: int, host: Host
) -> None:
    without = _find(heavy, _where(made_up, kib, None), microbatches=1)
    plan = _find(heavy, _where(made_up, kib, host), microbatches=1)
    assert (plan.decided(), plan.prediction) == (without.decided(), without.prediction)
    assert not any("host" in note for note in plan.notes)


@pytest.mark.parametrize("link", [1e12, 1e9, 2e8, 1e8, 5e7])
@pytest.mark.parametrize("kib", [CRAMPED, CRAMPED * 11 // 10, CRAMPED * 5 // 4])
def test_no_bound_hides_what_pays(heavy: StepGraph, made_up: MadeUp, kib: int, link: float) -> None:
    """Solved without a goal, nothing is worth its copies that is not found with one."""
    where, record = _where(made_up, kib, replace(FAST, link=link)), Record()
    plan = _find(heavy, where, record, microbatches=1)
    assert record.problem is not None
    best = None
    for spared in offered(record.pins, record.problem, record.batch):
        pins = replace(record.pins, spared=spared)
        fastest = _seconds(solve_all(record.problem, pins, record.batch).fitting[0])
        worth = 1.03 if best is not None and best[1] else 1.1
        if best is None or fastest <= best[0] / worth:
            best = fastest, spared
    assert best is not None
    assert (_seconds(plan), plan.offload) == (pytest.approx(best[0]), best[1])
    again = solve_as_needed(record.problem, record.pins, record.batch)
    assert again.fitting[0].decided() == plan.decided(notes=())
