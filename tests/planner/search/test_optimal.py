"""The search against plans of small problems, tried by plain loops (`tests.support.every_plan`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import inf
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphaccel import errors
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.planner.cluster.cluster import Cluster, Device, Link
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.layout_profiles import Layouts, rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import Shape
from graphaccel.planner.search.search import Conditions, search
from graphaccel.planner.search.search_state import weighed_of
from graphaccel.planner.search.solve import Problem, cut_choices
from tests.support.captures import captured_once
from tests.support.every_plan import Found, best_within, every_cut, every_plan, how_many
from tests.support.gpt import GPT

BATCH, TOKENS = 8, 8
BLOCKS = 1.05
"""Blocks are chosen by what each saves alone (`planner.search.recompute`): 1.023 was seen."""
LIMIT = 1200  # plans of a problem: more are narrowed down by further pins
REFUSALS = (errors.BadPin, errors.BatchNotDivisible, errors.ConflictingPins, errors.TooManyStages)


class Uneven(nn.Module):
    """Residual layers of other widths inside, and a wide head: float [B, 16], classes [B]."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for width in widths
        )
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), y)


def _gpt(**sizes: int) -> StepGraph:
    model = GPT(context=TOKENS, **sizes)
    ids = torch.zeros((BATCH, TOKENS), dtype=torch.int64)
    return capture(model, flatten_call((), {"input_ids": ids, "labels": ids.clone()}))


def _uneven(widths: tuple[int, ...], classes: int) -> StepGraph:
    batch = torch.zeros(BATCH, 16), torch.zeros(BATCH, dtype=torch.int64)
    return capture(Uneven(widths, classes), flatten_call(batch, {}))


MODELS: Mapping[str, Callable[[], StepGraph]] = {
    "gpt of 1": lambda: _gpt(vocabulary=64, width=16, heads=2, layers=1),
    "gpt of 2": lambda: _gpt(vocabulary=512, width=32, heads=4, layers=2),
    "uneven of 3": lambda: _uneven((8, 256, 32), 4),
    "uneven of 4": lambda: _uneven((64, 64, 256, 16), 1024),
}
SHARDED = "gpt of 1"
"""The model whose graph is also offered with its heads and tokens shared out: few graphs."""


@cache
def layouts_of(name: str) -> Layouts:
    """Of a model, made once; placements are those of one cluster, whatever the drawn links."""
    step = captured_once(f"optimal {name}", MODELS[name])
    if name != SHARDED:
        return Layouts(Profile(step))
    where = cluster_of(8, 1 << 30, ((8, 1e-6, 1e9),))
    return Layouts(
        Profile(step), lambda plan: sharded_graph(step, replace(plan, rates=rates_of(where, plan)))
    )


def cluster_of(count: int, memory: int, levels: tuple[tuple[int, float, float], ...]) -> Cluster:
    """levels: size, seconds of a hop and bytes/s of each level of links; the last one is widened to
    reach all."""
    device = Device("made-up", memory, {"float32": 1e10}, 1e9, 1e-6)
    *inner, (size, latency, bandwidth) = levels
    sizes = [*inner, (max(size, 8), latency, bandwidth)]
    links = tuple(Link(f"level {n}", at, rate, size) for n, (size, at, rate) in enumerate(sizes))
    return Cluster(device, count, links, context_bytes=0, fragmentation=0.05)


LATENCIES = (1e-8, 1e-6, 1e-4)
RATES = (1e7, 1e8, 1e9, 1e11)
PINS: Mapping[str, tuple[Any, ...]] = {
    "data": (1, 2, 4),
    "pipeline": (1, 2, 3, 4),
    "microbatches": (1, 2, 4, 8),
    "interleave": (1, 2),
    "recompute": ("none", "all"),
    "zero": (0, 1, 2, 3),
    "reshard_after_forward": ("always", "never", "once_per_step"),
    "accumulation": ("whole", "shards"),
}
HYBRID = range(60, 100)
"""Seeds of problems with a data axis that ZeRO may shard over a part of."""
FOUND = (62, 112, 153, 167, 172, 212, 239, 259, 272)
"""Problems of which it did not hold before: of GPipe, of cuts that are not even, of blocks that
save more together, of sends in parts that make a plan fit, of bounds of ZeRO 3."""


def drawn_by(seed: int) -> dict[str, Any]:
    """A problem. What hypothesis draws of a fixed seed depends on the modules that are imported."""
    draw = Random(seed)
    last = 8, draw.choice(LATENCIES), draw.choice(RATES)
    levels: tuple[tuple[int, float, float], ...] = (last,)
    if draw.random() >= 0.5:
        levels = (draw.choice((2, 4)), draw.choice(LATENCIES), draw.choice(RATES)), last
    pins = {name: draw.choice(values) for name, values in PINS.items() if draw.random() < 0.25}
    return {
        "model": draw.choice(sorted(MODELS)),
        "count": draw.randint(1, 8),
        "batch": draw.choice((4, 6, 8, 12)),
        "optimizer": draw.choice((0, 4, 8)),
        "shardable": draw.random() < 0.5,
        "levels": levels,
        "pins": pins,
        "tightness": draw.random(),
    }


NARROWER = (
    ("recompute", "none"), ("schedule", "1f1b"), ("interleave", 1), ("accumulation", "whole"),
    ("reshard_after_forward", "always"),
    ("tensor", 1), ("context", 1), ("microbatches", 2), ("zero", 0),
    ("microbatches", 1), ("pipeline", 2), ("pipeline", 1),
)  # fmt: skip


def narrowed(problem: Problem, pins: dict[str, Any], batch: int) -> dict[str, Any]:
    """With as many further pins as leave few plans to look at, and some."""
    for name, value in NARROWER:
        if how_many(problem, pins, batch) <= LIMIT:
            break
        more = {name: value, **pins}
        if how_many(problem, more, batch):
            pins = more
    return pins


def problem_of(drawn: Mapping[str, Any], memory: int = 1 << 40) -> Problem:
    where = cluster_of(drawn["count"], memory, drawn["levels"])
    return Problem(
        layouts_of(drawn["model"]), where, drawn["optimizer"], Limits(), drawn["shardable"],
        step_memory=drawn.get("step_memory", NOTHING),
    )  # fmt: skip


def planned(drawn: Mapping[str, Any], pins: Mapping[str, Any], memory: int) -> Plan | None:
    """The search's plan; None where it says that none fits, without looking for ways out."""
    problem = problem_of(drawn, memory)
    conditions = Conditions(
        batch=drawn["batch"], shardable=drawn["shardable"], step_memory=problem.step_memory
    )
    nothing = errors.InfeasiblePlan(devices=0, memory=0, peak=0, stage=0, closest="", breakdown={})
    with patch("graphaccel.planner.search.search.infeasible", return_value=nothing):
        try:
            return search(
                problem.profile.step, problem.cluster, pins=pins, profiles=problem.layouts,
                optimizer_bytes=drawn["optimizer"], conditions=conditions,
            )  # fmt: skip
        except errors.InfeasiblePlan:
            return None


UNLIKE = {
    "model": "gpt of 1", "count": 8, "batch": 12, "optimizer": 4, "shardable": True, "pins": {},
    "levels": ((2, 1e-4, 1e8), (8, 1e-6, 1e8)), "tightness": 0.0,
}  # fmt: skip
"""Stages of which one is long in forward and the other in backward: 1F1B of few microbatches is
faster than of even ones."""


@pytest.mark.parametrize("seed", [*range(60), *FOUND])
def test_the_search_finds_what_trying_plans_finds(seed: int) -> None:
    check(drawn_by(seed))


@pytest.mark.parametrize("seed", range(1, 60, 6))
def test_where_the_optimizers_step_may_take_most(seed: int) -> None:
    check({**drawn_by(seed), "step_memory": OptimizerMemory(together=2.0, each=1.0)})


@pytest.mark.parametrize("seed", HYBRID)
def test_it_finds_the_part_of_the_data_axis_to_shard_over(seed: int) -> None:
    drawn, draw = drawn_by(seed), Random(-seed)
    pins = {name: value for name, value in drawn["pins"].items() if name != "pipeline"}
    pins = {"data": draw.choice((4, 6, 8)), **pins} if draw.random() < 0.5 else pins
    if draw.random() < 0.5:
        pins["shard_size"] = draw.choice((2, 2, 4))
    check({**drawn, "count": draw.choice((4, 6, 8)), "pins": pins})


NODES = range(300, 330)
"""Seeds of problems on two nodes, with data and a pipeline: which of them crosses is a choice."""
SWAPPED = 310
"""One whose best plan has data outside the pipeline."""


def on_two_nodes(seed: int) -> dict[str, Any]:
    drawn, draw = drawn_by(seed), Random(-seed)
    count = draw.choice((4, 6, 8))
    near, far = draw.choice(((1e-6, 1e9), (1e-6, 1e11))), draw.choice(((1e-5, 1e7), (1e-4, 1e8)))
    levels = (count // 2, *near), (8, *far)
    pins = {**drawn["pins"], "data": count // 2, "pipeline": 2}
    pins.pop("microbatches", None)
    return {**drawn, "count": count, "batch": 12, "levels": levels, "pins": pins}


@pytest.mark.parametrize("seed", NODES)
def test_it_finds_the_order_of_the_axes(seed: int) -> None:
    check(on_two_nodes(seed))


SLOW_NEAR, FAST_FAR = (1e-4, 1e6), (1e-7, 1e11)
"""Links inside a node that are slower than those between nodes: what a bound takes to be near would
be too dear."""


@pytest.mark.parametrize("seed", range(400, 408))
def test_any_order_can_be_pinned(seed: int) -> None:
    """Bounds and search count collectives in the graph as far apart as they then are."""
    drawn, draw = on_two_nodes(seed), Random(seed)
    others = draw.sample([axis for axis in AXES if axis != "context"], len(AXES) - 1)
    pins = {"order": ("context", *others), "tensor": draw.choice((1, 2)), "context": 2}
    near, far = (SLOW_NEAR, FAST_FAR) if seed % 2 else (own[1:] for own in drawn["levels"])
    levels = (4, *near), (8, *far)
    own = {"model": SHARDED, "count": 8, "batch": 8, "pins": pins, "levels": levels}
    check({**drawn, **own})


@pytest.mark.parametrize("zero", [0, 3])
def test_data_may_be_quicker_between_nodes(zero: int) -> None:
    drawn, levels = on_two_nodes(410), ((4, *SLOW_NEAR), (8, *FAST_FAR))
    pins = {"data": 2, "pipeline": 4, "microbatches": 1, "recompute": "none", "zero": zero}
    check({**drawn, "model": "uneven of 4", "count": 8, "pins": pins, "levels": levels})


def test_the_best_plan_may_have_another_order() -> None:
    drawn = on_two_nodes(SWAPPED)
    roomy = problem_of(drawn)
    pins = narrowed(roomy, dict(drawn["pins"]), drawn["batch"])
    plan = planned(drawn, pins, 1 << 40)
    assert plan is not None
    assert plan.reordered == ("data", "pipeline")
    usual = planned(drawn, {**pins, "order": ("pipeline", "data")}, 1 << 40)
    assert usual is not None
    assert weighed_of(plan, Pins(**pins)) < weighed_of(usual, Pins(**pins)) * 0.98


def test_stages_that_are_unlike_each_other() -> None:
    check(UNLIKE)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_search_of_a_larger_problem_is_near_it(seed: int) -> None:
    """Where there is too much to try it all: cuts are even, among what fits if memory binds."""
    drawn = drawn_by(seed)
    roomy, batch = problem_of(drawn), drawn["batch"]
    pins = narrowed(roomy, dict(drawn["pins"]), batch)
    known: dict[Plan, Found] = {}
    found = every_plan(roomy, pins, batch, even_cuts(roomy), known)
    with patch("graphaccel.planner.search.exhaustive._CUTS", -1):
        for memory in levels(found, drawn):
            own = every_plan(problem_of(drawn, memory), pins, batch, even_cuts(roomy), known)
            plan, best = planned(drawn, pins, memory), best_within(own, memory)
            if plan is not None:
                most = 1 + 1e-9 if memory == max(one.peak for one in found) else BLOCKS
                assert weighed_of(plan, Pins(**pins)) <= best * most, (
                    plan_name(plan),
                    memory,
                    pins,
                )


def levels(found: list[Found], drawn: Mapping[str, Any]) -> list[int]:
    """Bytes of memory: of which nothing fits, little, more, and all."""
    peaks = sorted({one.peak for one in found})
    if not peaks:
        return []
    between = peaks[int(drawn["tightness"] * (len(peaks) - 1))]
    return sorted({peaks[0] - 1, peaks[0], between, between + between // 50, peaks[-1]})


def check(drawn: Mapping[str, Any]) -> None:
    """Every mesh, schedule, number of microbatches, level of ZeRO, set of cuts and set of blocks:
    the search has the best that fits, and says so."""
    roomy, batch = problem_of(drawn), drawn["batch"]
    pins = narrowed(roomy, dict(drawn["pins"]), batch)
    known: dict[Plan, Found] = {}
    found = every_plan(roomy, pins, batch, every_cut(roomy), known)
    if not found:
        with pytest.raises(REFUSALS):
            planned(drawn, pins, 1 << 40)
        return
    memories = levels(found, drawn)
    for memory in memories:
        plan, best = planned(drawn, pins, memory), best_within(found, memory)
        assert (plan is None) == (best == inf), (pins, memory)
        if plan is not None:
            assert weighed_of(plan, Pins(**pins)) == pytest.approx(best, rel=1e-9), (
                plan_name(plan), plan.cuts, plan.recompute, memory, pins,
            )  # fmt: skip
            assert "with every cut and every set of blocks" in plan.certificate
            again = planned(drawn, pins, memory)
            assert again is not None
            assert plan.to_json() == again.to_json()
    check_bounds(roomy, found, pins, batch, memories[len(memories) // 2])


def even_cuts(problem: Problem) -> Callable[[Plan], list[tuple[str, ...]]]:
    """The cuts of a mesh by their rule (`tests/planner/profile/test_stages.py` tries all)."""

    def cuts(mesh: Plan) -> list[tuple[str, ...]]:
        try:
            return list(cut_choices(problem, mesh))
        except errors.TooManyStages:
            return []

    return cuts


def check_bounds(
    problem: Problem, found: list[Found], pins: Mapping[str, Any], batch: int, memory: int
) -> None:
    """No plan takes less than its mesh's bound, and none fits where the bound says none does."""
    order = pins.get("order", AXES)
    base = Plan(problem.cluster.count, batch=batch, pinned=tuple(pins), order=order)
    tight = Bounds(problem_with(problem, memory), base)
    for mesh in {one.mesh for one in found}:
        own = [one for one in found if one.mesh == mesh]
        shape = Shape(
            recompute="none", **{n: getattr(mesh, n) for n in Shape._fields
                                 if n != "recompute"}
        )  # fmt: skip
        assert tight.build(shape.layout)
        (least,) = tight.seconds(columns([shape], batch)).tolist()
        assert all(least <= one.seconds * (1 + 1e-9) for one in own), (plan_name(mesh), least)
        (big,) = tight.too_big(columns([shape], batch)).tolist()
        assert not (big and any(one.peak <= memory for one in own)), plan_name(mesh)


def problem_with(problem: Problem, memory: int) -> Problem:
    device = replace(problem.cluster.device, memory=memory)
    return replace(problem, cluster=replace(problem.cluster, device=device))
