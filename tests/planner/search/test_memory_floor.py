"""What memory forces a candidate to recompute or to copy: no plan that fits takes less."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.model import without_data
from graphaccel.errors import GraphAccelError
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.estimate import activation_offload
from graphaccel.planner.estimate.stage_costs import held_together, least_flight
from graphaccel.planner.plan.base_plan import base_plan
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search import memory_floor
from graphaccel.planner.search.bounds import Bounds
from graphaccel.planner.search.candidate_columns import columns
from graphaccel.planner.search.candidates import Layout, Shape, meshes_of
from graphaccel.planner.search.memory_floor import Open, least_open, seconds_with_memory
from graphaccel.planner.search.solve import Problem, excess, with_cuts_and_blocks
from tests.planner.estimate.test_footprint import problem_of
from tests.support.gpt import GPT

BATCH = 32


@pytest.fixture(scope="module")
def deep() -> StepGraph:
    """As many blocks as devices, which save more than parameters take."""
    fake = without_data(GPT(layers=8, width=128))
    with next(fake.parameters()).fake_mode:
        ids = torch.empty(BATCH, 64, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": torch.empty_like(ids)}
    return capture(fake, flatten_call((), batch))


@pytest.fixture(scope="module")
def problem(deep: StepGraph) -> Problem:
    """Devices with room for what a few layers save."""
    where = cluster("h100-80gb", 8)
    device = replace(where.device, memory=where.context_bytes + 16 * 2**20)
    return problem_of(deep, replace(where, device=device))


def _solved(problem: Problem, pins: Pins, mesh: Shape, base: Plan) -> list[Plan]:
    """The plans of a mesh that fit, with every choice of recomputation, their schedules played."""
    result = []
    for choice in ("none", "some", "selective", "all"):
        try:
            plan = with_cuts_and_blocks(problem, mesh.on(base), choice, pins.cuts)
        except GraphAccelError:
            return []
        if excess(plan, problem.cluster) <= 0:
            result.append(problem.predicted(plan, simulated=True))
    return result


@pytest.mark.parametrize("offload", [(), ("activations",), ("optimizer",)], ids=str)
@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"context": 2}], ids=str)
def test_no_plan_that_fits_is_faster(
    offload: tuple[str, ...],
    axes: dict[str, int],
    problem: Problem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of meshes drawn at random, also where the graph of their layout is not built."""
    for module in (activation_offload, memory_floor):  # small values are copied too
        monkeypatch.setattr(module, "LARGE", 2**10)
    layout = Layout(**axes)
    pins = Pins(tensor=layout.tensor, context=layout.context, expert=1, offload=offload)
    base = base_plan(pins, 8, BATCH, "", "h100", "loss")
    meshes = list(meshes_of(problem, pins, BATCH, layout))
    drawn = Random(str(axes)).sample(meshes, 40)
    unmade, raised = Bounds(problem, base), 0
    before = [float(unmade.seconds(columns([mesh], BATCH))[0]) for mesh in drawn]
    early = [_bound(unmade, mesh, np.inf) for mesh in drawn]
    assert unmade.build(layout)
    made = Bounds(problem, base)
    for mesh, least, low in zip(drawn, early, before, strict=True):
        for plan in _solved(problem, pins, mesh, base):
            assert plan.prediction is not None
            time = plan.prediction.seconds * (1 + 1e-9)
            assert least <= time
            assert _bound(made, mesh, time) <= time, mesh
        raised += _bound(made, mesh, np.inf) > low * 1.001
    assert raised > 5


def _bound(bounds: Bounds, mesh: Shape, limit: float) -> float:
    of = columns([mesh], BATCH)
    return float(seconds_with_memory(bounds, of, limit)[0])


def test_the_least_of_what_is_open_is_at_most_that_of_any(problem: Problem) -> None:
    """Found by halving: at least the least bound, at most what each takes."""
    pins = Pins(tensor=1, context=1, expert=1)
    base = base_plan(pins, 8, BATCH, "", "h100", "loss")
    bounds, meshes = Bounds(problem, base), list(meshes_of(problem, pins, BATCH, Layout()))
    drawn = Random(1).sample(meshes, 25)
    plans = [plan for mesh in drawn for plan in _solved(problem, pins, mesh, base)]
    times = [plan.prediction.seconds for plan in plans if plan.prediction is not None]
    limit, of = max(times), columns(drawn, BATCH)
    least = seconds_with_memory(bounds, of, limit)
    low = least_open(bounds, [Open(of, least, 1, True)], limit)
    assert least.min() <= low <= min(times)
    assert low > bounds.seconds(of).min()


@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 64])
def test_no_division_among_a_ranks_stages_holds_less(each: int, microbatches: int) -> None:
    ranks, random = 4, np.random.default_rng(each)
    plan = Plan(
        ranks, pipeline=ranks, interleave=each, microbatches=microbatches, batch=microbatches,
        schedule="interleaved" if each > 1 else "1f1b",
    )  # fmt: skip
    least = least_flight(ranks, each, microbatches)
    for _ in range(50):
        sizes = random.integers(0, 1000, ranks * each)
        held = (held_together(plan, sizes) * sizes).reshape(each, ranks).sum(axis=0)
        assert (held >= least * sizes.reshape(each, ranks).sum(axis=0) - 1e-6).all()
    assert (least[:-1] >= least[1:]).all()
