"""Offload as a decision: when it is taken, what it is predicted to take, and what is said of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graphaccel import errors
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.planner.cluster.cluster import Cluster, Host, parse_bytes
from graphaccel.planner.estimate.estimate import predict
from graphaccel.planner.explain.what_if import explain, why_not
from graphaccel.planner.plan.offload import host_step_seconds, read_offload
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search import search
from graphaccel.report.compare import comparison
from graphaccel.report.text import plan_report
from tests.planner.searches import decisions_alone, without_relaxations
from tests.support.zoo import ZOO

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]
MIB = 2**20
HOST = Host(memory=64 * MIB, memory_bandwidth=2e8, link=1e8)
TIGHT = 560  # KiB: too little for parameters, gradients and state of the zoo's gpt, not for two


def _where(made_up: MadeUp, count: int, kib: int = 16 * 1024, host: Host | None = HOST) -> Cluster:
    return replace(made_up(count, kib), host=host)


def _find(step: StepGraph, where: Cluster, record: Record | None = None, **pins: Any) -> Plan:
    return search(step, where, pins=pins, optimizer_bytes=8, record=record)


def _peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(m.peak for m in plan.prediction.memory)


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.seconds


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("none", ()),
        ("optimizer", ("optimizer",)),
        (["optimizer"], ("optimizer",)),
        ((), ()),
        ("activations+optimizer", ("optimizer", "activations")),
        (("activations",), ("activations",)),
    ],
)
def test_values_of_the_pin(value: object, found: tuple[str, ...]) -> None:
    assert read_offload(value) == found


@pytest.mark.parametrize("value", ["disk", "none+optimizer", 3, True, ["optimizer", 1], ""])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(errors.BadPin) as caught:
        read_offload(value)
    assert caught.value.pin == "offload"
    assert "none" in caught.value.allowed


def test_it_is_not_taken_where_a_plan_fits_without(captured: Captured, made_up: MadeUp) -> None:
    step = captured("gpt")
    for kib in (16 * 1024, 1200):
        tried, none = _find(step, _where(made_up, 1, kib)), _find(step, made_up(1, kib))
        assert (tried.decided(), tried.prediction) == (none.decided(), none.prediction)


def test_it_is_taken_where_nothing_fits_without(captured: Captured, made_up: MadeUp) -> None:
    step, where = captured("gpt"), _where(made_up, 1, TIGHT)
    with without_relaxations(), pytest.raises(errors.InfeasiblePlan):
        _find(step, made_up(1, TIGHT))
    plan = _find(step, where)
    assert plan.offload == ("optimizer",)
    assert plan.pinned == ()
    assert _peak(plan) <= where.device.memory
    assert any(n.startswith("optimizer on the host: without, no plan fits by") for n in plan.notes)
    assert "optimizer on the host" in plan_name(plan)


def test_a_pin_decides(captured: Captured, made_up: MadeUp) -> None:
    step = captured("gpt")
    plan = _find(step, _where(made_up, 1), offload="optimizer")
    assert (plan.offload, plan.pinned) == (("optimizer",), ("offload",))
    with pytest.raises(errors.InfeasiblePlan) as caught:
        _find(step, _where(made_up, 1, TIGHT), offload="none")
    change, effect = caught.value.relaxations[0]
    assert change == "offload=optimizer"
    assert effect.startswith("peak ")


def test_a_host_that_is_too_small(captured: Captured, made_up: MadeUp) -> None:
    step, small = captured("gpt"), replace(HOST, memory=MIB // 2)
    with pytest.raises(errors.InfeasiblePlan) as caught:
        _find(step, _where(made_up, 1, 16 * 1024, small), offload="optimizer")
    error = caught.value
    assert error.host_memory == MIB // 2 < error.host
    kept = f"{error.host / MIB:.1f} MiB"
    assert error.message().sentence == (
        f"no plan fits 1 x 16.0 MiB with 0.5 MiB of its host each; the closest needs {kept} of it "
        f"({error.host / MIB - 0.5:.1f} MiB over)"
    )
    named = re.fullmatch("hosts of (.*) for each device", error.relaxations[-1][0])
    assert named is not None
    assert 0 <= parse_bytes(named[1]) - error.host < MIB // 10
    # a processor's own memory is that of its host: its peak counts there too
    enough = replace(HOST, memory=error.host + MIB // 4)
    where = _where(made_up, 1, 16 * 1024, enough)
    assert _find(step, where, offload="optimizer").offload
    shared = replace(where, host=replace(enough, shared=True))
    with without_relaxations(), pytest.raises(errors.InfeasiblePlan):
        _find(step, shared, offload="optimizer")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host": None}, "the description of the cluster has no host, with its memory and links"),
        ({"optimizer_bytes": 0}, "there is no optimizer state"),
    ],
)
def test_what_can_not_be_offloaded(
    captured: Captured, made_up: MadeUp, settings: dict[str, Any], reason: str
) -> None:
    where = _where(made_up, 1, host=settings.get("host", HOST))
    given = {"offload": "optimizer"}
    with pytest.raises(errors.BadPin) as caught:
        search(captured("gpt"), where, pins=given,
               optimizer_bytes=settings.get("optimizer_bytes", 8))  # fmt: skip
    assert caught.value.reason == reason
    assert str(caught.value).splitlines()[0] == (
        "error[GA202]: offload='optimizer' can not be planned"
    )


PLANS = (
    {"data": 2, "pipeline": 1, "microbatches": 2},
    {"data": 2, "pipeline": 1, "zero": 1, "microbatches": 1},
    {"data": 2, "pipeline": 1, "zero": 3, "microbatches": 2},
    {"data": 1, "pipeline": 2, "interleave": 1, "microbatches": 4},
)


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_seconds_and_bytes(captured: Captured, made_up: MadeUp, pins: dict[str, Any]) -> None:
    """Each against the same plan without offload, by the formulas of `planner.plan.offload`."""
    step, where = captured("gpt"), _where(made_up, 2)
    profile = Profile(step)
    without = _find(step, where, recompute="none", offload="none", **pins)
    away = predict(profile, replace(without, offload=("optimizer",)), where, 8)
    before = predict(profile, without, where, 8)
    assert before.prediction is not None
    assert away.prediction is not None
    assert "offload" not in before.prediction.terms
    moved = []
    for kept, left in zip(before.prediction.memory, away.prediction.memory, strict=True):
        assert (kept.host, left.optimizer) == (0, 0)
        assert left.host == 2 * kept.optimizer  # state, and half as much of each of the other two
        assert kept.tensors - left.tensors == kept.optimizer
        moved.append(kept.optimizer // 2)
    assert away.prediction.offload == pytest.approx(3 * max(moved) / HOST.link)
    assert away.prediction.optimizer >= max(moved) * 7 / HOST.memory_bandwidth
    assert _seconds(away) == pytest.approx(sum(away.prediction.terms.values()))
    assert _seconds(away) > _seconds(before)


def test_the_host_is_not_taken_to_be_faster_than_the_device(made_up: MadeUp) -> None:
    fast = _where(made_up, 1, host=Host(MIB, 1e30, 1e30))
    assert host_step_seconds(1e6, 10, 8, fast, 0.25) == (0.25, pytest.approx(0.0))


def test_built_memory_is_close_to_the_estimate(made_up: MadeUp) -> None:
    module, batch, loss_fn = ZOO["gpt"].build()
    pins = {"data": 2, "zero": 1, "pipeline": 1, "microbatches": 1, "offload": "optimizer"}
    compiler = Compiler(Model(module, loss_fn, 2.0), _where(made_up, 2), pins)
    chosen = compiler.choose(as_batch(batch))
    step, plan = chosen.step, chosen.plan
    estimated = predict(Profile(step), plan, _where(made_up, 2), 8)
    assert plan.prediction is not None
    assert estimated.prediction is not None
    exact, guessed = plan.prediction.memory[0], estimated.prediction.memory[0]
    assert exact.optimizer == guessed.optimizer == 0
    assert guessed.host == pytest.approx(exact.host, rel=0.02)


def test_plans_are_read_back_and_older_ones_too(captured: Captured, made_up: MadeUp) -> None:
    plan = _find(captured("gpt"), _where(made_up, 1), offload="optimizer")
    assert Plan.from_json(plan.to_json()) == plan
    older = json.loads(_find(captured("gpt"), made_up(1)).to_json())
    del older["offload"], older["prediction"]["offload"]
    for memory in older["prediction"]["memory"]:
        del memory["host"]
    assert Plan.from_json(json.dumps(older)).offload == ()


def test_reports_say_what_lies_on_the_host(captured: Captured, made_up: MadeUp) -> None:
    step, where = captured("gpt"), _where(made_up, 2)
    pins = {"pipeline": 2, "interleave": 1, "microbatches": 4, "recompute": "none"}
    plain, away = (_find(step, where, **pins, offload=o) for o in ("none", "optimizer"))
    assert away.prediction is not None

    def report(plan: Plan) -> str:
        return plan_report(plan, step, where, model_name="gpt", assumed="")

    assert "host" not in report(plain)
    text = " ".join(report(away).split())
    first, second = (m.host / MIB for m in away.prediction.memory)
    assert f"on the host, of 64.0 MiB for each device: rank 0 {first:.1f} MiB; rank 1" in text
    assert second > 0
    assert " · offload " in text
    both = comparison(plain, away, names=("a", "b"))
    assert "  on the host " in both
    assert "  offload " in both


def test_explanations_plan_with_and_without(captured: Captured, made_up: MadeUp) -> None:
    """Where nothing fits without it, other values of other decisions are planned with it too."""
    step, where = captured("gpt"), _where(made_up, 1, TIGHT)
    record = Record()
    plan = _find(step, where, record)
    with decisions_alone():
        why = explain(record, plan)
    (decision,) = [d for d in why.decisions if d.name == "offload"]
    assert (decision.value, decision.pinned) == ("optimizer", False)
    others = {c.value: c for c in decision.others}
    away = {"optimizer+parameters", "optimizer+parameters+activations"}
    assert set(others) == {"none", "activations", "optimizer+activations", *away}
    assert others["none"].seconds is None
    assert "does not fit" in others["none"].reason
    (recompute,) = [d for d in why.decisions if d.name == "recompute"]
    assert any(c.seconds is not None for c in recompute.others)
    answer = why_not(record, plan, {"offload": "none"})
    assert answer.verdict == "does not fit"


def test_the_text_of_a_host_that_is_too_small() -> None:
    gib = 2**30
    error = errors.InfeasiblePlan(
        devices=2,
        memory=24 * gib,
        peak=20 * gib,
        stage=0,
        closest="data 2 · optimizer on the host",
        breakdown={"param": 20 * gib},
        relaxations=(("hosts of 70.0 GiB for each device", "data 2 · optimizer on the host"),),
        host=70 * gib,
        host_memory=64 * gib,
    )
    assert (
        str(error)
        == """\
error[GA201]: no plan fits 2 x 24.0 GiB with 64.0 GiB of its host each; the closest needs \
70.0 GiB of it (6.0 GiB over)
  closest: data 2 · optimizer on the host
           param 20.0 GiB
  any one of these makes it fit:
    hosts of 70.0 GiB for each device  data 2 · optimizer on the host
  explain: graphaccel explain GA201"""
    )


class Wide(nn.Module):
    """Two blocks whose middle is 2 MiB for each four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def wide() -> StepGraph:
    """Its step, of eight rows of 256."""
    return capture(Wide(), flatten_call((torch.zeros(8, 256, 16),), {}))


ACTIVATIONS = (
    {"microbatches": 1},
    {"microbatches": 2},
    {"pipeline": 2, "data": 1, "interleave": 1, "microbatches": 2},
)


@pytest.mark.parametrize("pins", ACTIVATIONS, ids=str)
def test_activations_are_counted_where_they_wait(
    made_up: MadeUp, wide: StepGraph, pins: dict[str, Any]
) -> None:
    count = pins.get("pipeline", 1)
    where, module = _where(made_up, count, 1 << 20), Wide()
    batch = as_batch((torch.zeros(8, 256, 16),))
    found = {}
    for offload in ("none", "activations"):
        given = {"recompute": "none", **pins, "offload": offload}
        compiler = Compiler(Model(module, None, 2.0), where, given)
        chosen = compiler.choose(batch)
        step, plan = chosen.step, chosen.plan
        assert plan.prediction is not None
        guessed = predict(Profile(step), plan, where, 8).prediction
        assert guessed is not None
        found[offload] = plan.prediction
        for exact, about in zip(plan.prediction.memory, guessed.memory, strict=True):
            assert about.host == pytest.approx(exact.host, rel=0.05)
            assert about.tensors == pytest.approx(exact.tensors, rel=0.35)
    for kept, away in zip(found["none"].memory, found["activations"].memory, strict=True):
        assert away.host >= 2 * MIB > kept.host == 0
        assert away.tensors < kept.tensors
    assert found["activations"].seconds > found["none"].seconds
    # each byte goes down once and up once, one microbatch after the other
    moved = pins["microbatches"] * 2 * (2 * MIB) / HOST.link
    assert found["activations"].offload >= moved / count


def test_activations_are_taken_where_state_is_not_enough(made_up: MadeUp, wide: StepGraph) -> None:
    """What costs least to copy is tried first."""
    pins = {"microbatches": 1, "recompute": "none"}
    roomy = _where(made_up, 1, 1 << 20)
    plain, least = (_find(wide, roomy, **pins, offload=o) for o in ("none", "activations"))
    assert _peak(least) < 0.9 * _peak(plain)
    kib = (_peak(least) >> 10) + 1
    plan = _find(wide, _where(made_up, 1, kib), **pins)
    assert plan.offload == ("activations",)
    assert _peak(plan) <= kib << 10
    assert "activations on the host" in plan_name(plan)


def test_no_bound_rules_out_what_fits_with_activations_away(
    made_up: MadeUp, wide: StepGraph
) -> None:
    """As tight as a plan with everything away: it is found, as if nothing were pruned."""
    pins = {"microbatches": 1, "recompute": "none", "offload": "optimizer+activations"}
    least = _find(wide, _where(made_up, 1, 1 << 20), **pins)
    where = _where(made_up, 1, (_peak(least) >> 10) + 1)
    assert _find(wide, where, **pins).decided() == least.decided()
    record = Record()
    free = _find(wide, where, record, offload="optimizer+activations")
    assert record.problem is not None
    every = solve_all(record.problem, record.pins, record.batch, prune=False).fitting
    assert _seconds(free) == pytest.approx(min(map(_seconds, every)))
