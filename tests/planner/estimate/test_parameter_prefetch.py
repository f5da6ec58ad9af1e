"""Parameters on the host, as planned: what they take, and with what they go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphaccel import errors
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.planner.cluster.cluster import Cluster, Host
from graphaccel.planner.estimate.estimate import predict
from graphaccel.planner.estimate.parameter_prefetch import uploaded
from graphaccel.planner.estimate.stage_costs import sized_for, stage_costs
from graphaccel.planner.explain.what_if import why_not
from graphaccel.planner.plan.base_plan import base_plan
from graphaccel.planner.plan.offload import LEAVING, STAYING, read_offload
from graphaccel.planner.plan.pins import OFFLOADS, Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import Layout, Shape, meshes_of, plain
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search import Conditions, search
from graphaccel.planner.search.solve import excess, with_cuts_and_blocks
from graphaccel.report.text import plan_report
from tests.planner.estimate.test_footprint import problem_of
from tests.planner.searches import without_relaxations
from tests.support.zoo import ZOO

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]
MIB = 2**20
HOST = Host(memory=64 * MIB, memory_bandwidth=2e8, link=1e8)
STATE, BOTH = ("optimizer",), ("optimizer", "parameters")
TIGHT = 440  # KiB: too little for parameters and gradients of the zoo's gpt, not for gradients


class Blocks(nn.Module):
    """Three blocks of two linear layers; before them a scale that is not trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.ones(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.shift
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


BLOCK, SCALE = 4 * (8 * 32 + 32 + 32 * 8 + 8), 4 * 8


@pytest.fixture(scope="module")
def blocks() -> StepGraph:
    """Its step, of four rows."""
    return capture(Blocks(), flatten_call((torch.zeros(4, 8),), {}))


def _where(made_up: MadeUp, count: int, kib: int = 16 * 1024, host: Host = HOST) -> Cluster:
    return replace(made_up(count, kib), host=host)


def _find(step: StepGraph, where: Cluster, record: Record | None = None, **pins: Any) -> Plan:
    return search(step, where, pins=pins, optimizer_bytes=8, record=record)


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.seconds


@pytest.mark.parametrize("value", OFFLOADS)
def test_values_of_the_pin(value: str) -> None:
    kinds = read_offload(value)
    assert ("parameters" in kinds) is (value in LEAVING)
    assert "+".join(kinds) == value.replace("none", "")


@pytest.mark.parametrize("value", ["parameters", ("activations", "parameters")])
def test_parameters_are_not_there_without_the_step(value: object) -> None:
    with pytest.raises(errors.BadPin) as caught:
        read_offload(value)
    assert caught.value.reason.startswith("parameters on the host are stepped there")
    assert caught.value.allowed == LEAVING


@pytest.mark.parametrize("zero", [0, 3])
def test_a_block_is_copied_up_ahead_of_use_and_let_go_of_after_it(
    blocks: StepGraph, zero: int
) -> None:
    """The scale, then three blocks: two of these four at a time, and the same from the end on;
    under ZeRO 3 the shards of those that are not gathered yet."""
    profile = Profile(blocks)
    data = 2 if zero else 1
    plan = Plan(data, data=data, batch=4, zero=zero, offload=BOTH)
    forward, backward = uploaded(profile, plan, (0, len(profile)))
    reads = {p.name: p.positions for p in profile.parameters if p.name in profile.parameter_names}
    own = [
        [at for n, places in reads.items() if n.startswith(f"blocks.{i}.") for at in places]
        for i in range(3)
    ]
    first, last = [min(at) for at in own], [max(at) for at in own]
    (scale,) = reads["scale"]
    expected = np.zeros((2, len(profile)), dtype=np.int64)
    starts = scale, *first
    sizes = SCALE, BLOCK, BLOCK, BLOCK
    if zero == 0:
        for k, size in enumerate(sizes):
            end = (scale, *last)[k]
            expected[0, (starts[k - 1] if k else 0) : end + 1] += size
            behind = last[k] if k < 3 else len(profile) - 1
            expected[1, starts[k] : behind + 1] += size
    else:
        for k, size in enumerate(sizes):
            sent = starts[k - 1] if k else 0
            before = (0, 0, *starts)[k]
            expected[0, before : max(sent, starts[k] - 1) + 1] += size // 2
            sent = last[k] if k < 3 else len(profile) - 1
            behind = (*last, len(profile) - 1, len(profile) - 1)[k + 1]
            expected[1, min(sent, (scale, *last)[k] + 1) : behind + 1] += size // 2
    assert forward.tolist() == expected[0].tolist()
    assert backward.tolist() == expected[1].tolist()
    assert forward.max() == 2 * BLOCK // data


CASES = (
    {"microbatches": 1},
    {"microbatches": 2},
    {"microbatches": 1, "recompute": "all"},
    {"pipeline": 2, "data": 1, "interleave": 1, "microbatches": 4},
    {"data": 2, "microbatches": 2, "accumulation": "shards"},
)


@pytest.mark.parametrize("pins", CASES, ids=str)
def test_built_memory_is_close_to_the_estimate(made_up: MadeUp, pins: dict[str, Any]) -> None:
    """Device and host; parameters are on the host once, and nothing of them rests on the device."""
    module, batch, loss_fn = ZOO["gpt"].build()
    where = _where(made_up, pins.get("data", 1) * pins.get("pipeline", 1), 1 << 20)
    found = {}
    for offload in (STATE, BOTH):
        given = {"recompute": "none", **pins, "offload": offload}
        compiler = Compiler(Model(module, loss_fn, 2.0), where, given)
        chosen = compiler.choose(as_batch(batch))
        step, plan = chosen.step, chosen.plan
        guess = predict(Profile(step), plan, where, 8).prediction
        assert plan.prediction is not None
        assert guess is not None
        for exact, about in zip(plan.prediction.memory, guess.memory, strict=True):
            assert about.host == pytest.approx(exact.host, rel=0.02)
            if offload == BOTH:
                assert about.tensors == pytest.approx(exact.tensors, rel=0.06)
                assert exact.parameter == 0
        found[offload] = plan
    assert found[BOTH].zero == (3 if found[BOTH].data > 1 else 0)
    kept, away = (found[o].prediction for o in (STATE, BOTH))
    assert kept is not None
    assert away is not None
    for before, after in zip(kept.memory, away.memory, strict=True):
        assert after.host == pytest.approx(before.host, rel=0.02)
        assert after.tensors < before.tensors


def test_what_is_not_trained_rests_there_too(made_up: MadeUp, blocks: StepGraph) -> None:
    where = _where(made_up, 1)
    trained = 3 * BLOCK
    pins = {"microbatches": 1, "offload": BOTH}
    compiler = Compiler(Model(Blocks(), None, 2.0), where, pins)
    chosen = compiler.choose(as_batch((torch.zeros(4, 8),)))
    step, plan = chosen.step, chosen.plan
    guess = predict(Profile(step), plan, where, 8).prediction
    assert plan.prediction is not None
    assert guess is not None
    for found in (plan.prediction, guess):  # state, parameter and gradient of each number
        assert found.memory[0].host == 4 * trained + SCALE
        assert found.memory[0].parameter == 4 * 8  # the buffer stays


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("data", [1, 2])
def test_seconds(captured: Captured, made_up: MadeUp, data: int, shared: bool) -> None:
    """Gradients go down once a step; parameters come up in each forward and each backward."""
    step, where = captured("gpt"), _where(made_up, data, host=replace(HOST, shared=shared))
    profile = Profile(step)
    plan = Plan(data, data=data, batch=8, microbatches=2, zero=3 if data > 1 else 0)
    kept, away = (
        predict(profile, replace(plan, offload=o), where, 8).prediction for o in (STATE, BOTH)
    )
    assert kept is not None
    assert away is not None
    gradient = profile.trained_bytes / data
    assert kept.offload == pytest.approx(3 * gradient / HOST.link)
    assert (away.optimizer, away.communication) == (kept.optimizer, kept.communication)
    (work,) = stage_costs(
        profile, sized_for(profile, plan, where), plan, where.device.launch_seconds
    )
    by_block = {}
    for parameter in profile.parameters:  # the embedding of words is the head's too
        if parameter.name in profile.parameter_names:
            parts = parameter.name.split(".")
            name = ".".join(parts[:2]) if parts[0] == "blocks" else parameter.name
            times = len({int(profile.block_at[at]) >= 0 or at for at in parameter.positions})
            by_block[name] = by_block.get(name, 0) + times * parameter.bytes
    once, first = (of(by_block.values()) / data / HOST.link for of in (sum, max))
    phases = work.forward, work.backward
    beside = [once - (1 - first / once) * phase for phase in phases]
    each = [once if shared else max(first, late) for late in beside]
    assert away.offload == pytest.approx(gradient / HOST.link + 2 * sum(each))
    assert away.seconds == pytest.approx(sum(away.terms.values()))


@pytest.mark.parametrize("offload", LEAVING)
@pytest.mark.parametrize("pins", [{}, {"data": 2}, {"microbatches": 2}], ids=str)
def test_nothing_that_is_best_is_ruled_out(
    captured: Captured, made_up: MadeUp, offload: str, pins: dict[str, Any]
) -> None:
    """The search finds what trying everything finds, where there is room and where there is little;
    over data in shards, of which none is gathered for longer than a block. It may find more: cuts
    and blocks of small problems are tried whole (`planner.search.exhaustive`)."""
    step = captured("gpt")
    for kib in (16 * 1024, 540):
        where, record = _where(made_up, 2, kib), Record()
        plan = _find(step, where, record, offload=offload, **pins)
        assert record.problem is not None
        every = solve_all(record.problem, record.pins, record.batch, prune=False)
        assert _seconds(plan) <= min(map(_seconds, every.fitting)) * (1 + 1e-9)
        assert every.seen
        for other in every.seen:
            assert other.zero == (3 if other.data > 1 else 0)
            assert other.reshard_after_forward == "always"
            assert not other.cast_once
            assert other.schedule != "zero_bubble"


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize(("count", "kib"), [(1, TIGHT), (4, 300)])
def test_no_bound_is_above_what_is_predicted(
    captured: Captured, made_up: MadeUp, count: int, kib: int, precision: str
) -> None:
    step, where = captured("gpt"), _where(made_up, count, kib)
    problem = problem_of(step, where)
    pins = Pins(recompute="all", precision=precision, offload=BOTH)
    base = base_plan(pins, count, 8, step.fingerprint, "made-up", "loss")
    meshes = list(meshes_of(problem, pins, 8, Layout()))
    bounds, of = Bounds(problem, base), columns(meshes, 8)
    told = zip(meshes, bounds.seconds(of).tolist(), bounds.too_big(of).tolist(), strict=True)
    fitting = 0
    for mesh, least, big in told:
        if mesh.pipeline * mesh.interleave > 4:
            continue
        plan = with_cuts_and_blocks(problem, mesh.on(base), "all", None)
        assert least <= _seconds(plan) * (1 + 1e-9), mesh
        if excess(plan, where) <= 0:
            fitting += 1
            assert not big, mesh
    assert 0 < fitting < len(meshes)


@pytest.mark.release
def test_it_is_tried_where_nothing_else_fits(captured: Captured, made_up: MadeUp) -> None:
    step, where = captured("gpt"), _where(made_up, 1, TIGHT)
    plan = _find(step, where)
    assert plan.offload == BOTH
    assert any(
        n.startswith("optimizer+parameters on the host: without, no plan") for n in plan.notes
    )
    with pytest.raises(errors.InfeasiblePlan) as caught:
        _find(step, where, offload="optimizer")
    assert dict(caught.value.relaxations)["offload=optimizer+parameters"].startswith("peak ")
    assert _find(step, where, offload="optimizer+parameters").offload == BOTH
    with pytest.raises(errors.InfeasiblePlan) as caught:  # of the host's own memory: no such plan
        _find(step, replace(where, host=None))
    assert not any("parameters" in change for change, _ in caught.value.relaxations)
    for pins in ({"zero": 1, "data": 2}, {"zero": 0, "data": 2}, {"zero": 1}):
        with without_relaxations(), pytest.raises(errors.InfeasiblePlan):
            _find(step, _where(made_up, 2, 200), **pins)
    with pytest.raises(errors.InfeasiblePlan) as caught:  # with what is pinned it can not be
        _find(step, _where(made_up, 2, 200), data=2, reshard_after_forward="never")
    said = (*(change for change, _ in caught.value.relaxations), *caught.value.useless)
    assert not any("parameters" in change for change in said)


@pytest.mark.parametrize(
    ("pins", "reason", "instead"),
    [
        ({"zero": 1}, "which is zero=3", (0, 3)),
        ({"zero": 0, "data": 2}, "which is zero=3", (3,)),
        ({"reshard_after_forward": "never"}, "no device holds them between", ("always",)),
        ({"reshard_after_forward": "once_per_step"}, "no device holds them between", ("always",)),
        (
            {"schedule": "zero_bubble", "pipeline": 2},
            "parameters on the host are copied up for the forward and the backward alone",
            ("gpipe", "1f1b", "interleaved"),
        ),
    ],
    ids=str,
)
def test_pins_that_contradict_it(
    captured: Captured, made_up: MadeUp, pins: dict[str, Any], reason: str, instead: tuple
) -> None:
    with pytest.raises(errors.ConflictingPins) as caught:
        _find(captured("gpt"), _where(made_up, 2), offload="optimizer+parameters", **pins)
    assert caught.value.reason.endswith(reason)
    assert caught.value.instead[next(iter(pins))] == instead
    assert set(caught.value.instead["offload"]) <= set(STAYING)


def test_shards_are_asked_for_with_it() -> None:
    """They do not count as slower than they are predicted, as what nobody asked for does."""
    shape = Shape(1, 1, 1, "none", data=2, zero=3)
    assert not plain(Pins(offload=STATE), shape)
    assert plain(Pins(offload=BOTH), shape)
    assert not plain(Pins(offload=BOTH), shape._replace(tensor=2))


def test_casts_are_not_held_for_all_microbatches(captured: Captured, made_up: MadeUp) -> None:
    pins = {"offload": "optimizer+parameters", "precision": "bf16", "microbatches": 2}
    with pytest.raises(errors.ConflictingPins) as caught:
        _find(captured("gpt"), _where(made_up, 1), cast_once=True, **pins)
    assert set(caught.value.pins) == {"cast_once", "offload"}
    assert caught.value.reason.startswith("parameters on the host are cast when they were copied")
    plan = Plan(1, precision=replace(Plan(1).precision, compute="bfloat16"), cast_once=True)
    assert plan.holds_casts
    assert not replace(plan, offload=BOTH).holds_casts


@pytest.mark.parametrize(
    ("settings", "pins", "reason"),
    [
        ({}, {"zero": 0, "pipeline": 1}, "zero=0 keeps them whole"),
        (
            {"conditions": Conditions(shardable=False)},
            {"pipeline": 1},
            "the optimizer is not known to step shards",
        ),
    ],
)
def test_over_data_they_rest_in_shards(
    captured: Captured, made_up: MadeUp, settings: dict[str, Any], pins: dict[str, Any], reason: str
) -> None:
    given = {"offload": "optimizer+parameters", **pins}
    with pytest.raises(errors.BadPin) as caught:
        search(captured("gpt"), _where(made_up, 2), pins=given, optimizer_bytes=8, **settings)
    assert caught.value.pin == "offload"
    assert caught.value.reason.endswith(f"parameters on the host rest in shards, and {reason}")


def test_reports_and_files_say_it(captured: Captured, made_up: MadeUp) -> None:
    step, where, record = captured("gpt"), _where(made_up, 2), Record()
    plan = _find(step, where, record, offload="optimizer+parameters", data=2)
    assert Plan.from_json(plan.to_json()) == plan
    text = " ".join(plan_report(plan, step, where, model_name="gpt", assumed="").split())
    assert "optimizer and parameters on the host" in text
    assert "all parameters, copied up for each block that reads them" in text
    plain = _find(step, where, record, data=2)
    answer = why_not(record, plain, {"offload": "optimizer+parameters"})
    assert answer.verdict == "slower"
    assert answer.name == plan_name(plan)
