"""No bound is above what is predicted, across nodes and for graphs that are not made yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.model import without_data
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.estimate.simulate import play
from graphaccel.planner.plan.base_plan import base_plan
from graphaccel.planner.plan.pins import RESHARDS, Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import collective_costs_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.bounds import Bounds, recompute_curve
from graphaccel.planner.search.branch_and_bound import seconds
from graphaccel.planner.search.candidate_columns import columns, least_idle
from graphaccel.planner.search.candidates import Layout, Shape, meshes_of
from graphaccel.planner.search.closing import fewest_bytes_first
from graphaccel.planner.search.data_axis_bounds import least_moved
from graphaccel.planner.search.recompute import least_saved
from graphaccel.planner.search.solve import with_cuts_and_blocks
from tests.planner.estimate.test_footprint import problem_of
from tests.support.gpt import GPT

BATCH = 32


@pytest.fixture(scope="module")
def wide() -> StepGraph:
    """Many parameters and few tokens: gradients take longer than what hides them."""
    fake = without_data(GPT(layers=4, width=1024))
    with next(fake.parameters()).fake_mode:
        ids = torch.empty(BATCH, 32, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": torch.empty_like(ids)}
    return capture(fake, flatten_call((), batch))


def test_a_sum_over_more_axes_may_take_less(wide: StepGraph) -> None:
    """Of 64 devices 8 of a data group lie in as many nodes; with the context axis they fill them,
    and a sum over both has eight links between nodes."""
    where, profile = cluster("h100-80gb", 64), Profile(wide)
    for zero, axes in ((0, ("data", "context")), (1, ("data", "context")), (2, ("data",))):
        plan = Plan(64, data=8, context=8, zero=zero, batch=BATCH)
        size = profile.trained_bytes
        over_all = collective_costs_of(where, plan).all_reduce(size, axes)
        least = least_moved(profile, plan, where).reduce
        assert 0 < least <= over_all
        alone = collective_costs_of(where, plan).all_reduce(size, ("data",))
        assert least < alone


@pytest.mark.parametrize("axes", [{"context": 8}, {"tensor": 2, "context": 4}], ids=str)
def test_no_bound_is_above_what_is_predicted_across_nodes(
    axes: dict[str, int], wide: StepGraph
) -> None:
    where, layout = cluster("h100-80gb", 64), Layout(**axes)
    problem = problem_of(wide, where)
    pins = Pins(recompute="none", expert=1, sequence=True, **axes)
    base = base_plan(pins, 64, BATCH, wide.fingerprint, "h100", "loss")
    meshes = list(meshes_of(problem, pins, BATCH, layout))
    bounds = Bounds(problem, base)
    before = bounds.seconds(columns(meshes, BATCH)).tolist()
    assert bounds.build(layout)
    after = Bounds(problem, base).seconds(columns(meshes, BATCH)).tolist()
    looked = 0
    for mesh, unmade, made in zip(meshes, before, after, strict=True):
        if mesh.pipeline * mesh.interleave > 4:
            continue
        predicted = seconds(with_cuts_and_blocks(problem, mesh.on(base), "none", None))
        assert unmade <= predicted * (1 + 1e-9), mesh
        assert made <= predicted * (1 + 1e-9), mesh
        looked += mesh.data > 1
    assert looked > 10


SECONDS = st.floats(0.0, 1.0).map(lambda x: round(x, 3))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Shape, np.ndarray]:
    """A schedule, and seconds of each stage's forward, backward, and what of that may be apart."""
    ranks, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 9))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero_bubble"]))
    each = draw(st.sampled_from([2, 4])) if schedule == "interleaved" else 1
    rows = draw(st.lists(st.tuples(*3 * [SECONDS]), min_size=ranks * each, max_size=ranks * each))
    forward, backward, share = np.array(rows).T
    apart = share * backward if schedule == "zero_bubble" else 0 * share
    shape = Shape(microbatches, ranks, each, "none", 1, schedule=schedule)
    return shape, np.stack([forward, backward, apart])


@settings(max_examples=400, derandomize=True, database=None, deadline=None)
@given(pipelines())
def test_no_cuts_make_a_device_wait_less(drawn: tuple[Shape, np.ndarray]) -> None:
    """However uneven the stages are, with messages that take no time."""
    shape, (forward, backward, weight) = drawn
    messages: dict[Any, float] = {}
    for stage in range(len(forward) - 1):
        messages[stage, stage + 1, "forward"] = messages[stage + 1, stage, "backward"] = 0.0
    played = play(
        (shape.schedule, shape.pipeline, shape.interleave, shape.microbatches),
        (forward.tolist(), (backward - weight).tolist(), weight.tolist()),
        messages, [0.0] * len(forward),
    ).makespan  # fmt: skip
    work = np.array([forward.sum() + backward.sum()])
    of = columns([shape], shape.microbatches)
    idle = least_idle(of, work, weight.sum())
    assert played >= (shape.microbatches * work / shape.pipeline + idle)[0] - 1e-9


def test_two_unlike_stages_and_two_microbatches() -> None:
    """The least that 1F1B of these takes: 4/3 of the work, where even stages take 3/2."""
    forward, backward = [1.0, 1.0], [1.0, 0.0]
    messages = {(0, 1, "forward"): 0.0, (1, 0, "backward"): 0.0}
    played = play(("1f1b", 2, 1, 2), (forward, backward, [0.0, 0.0]), messages, [0.0, 0.0])
    of = columns([Shape(2, 2, 1, "none", 1)], 2)
    assert played.makespan == pytest.approx(4.0)
    assert 3.0 + least_idle(of, np.array([3.0]), np.zeros(1)) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("forward", "backward", "least"),
    [((3, 3, 3, 6), (5, 5, 5, 0), 64), ((18, 18, 18, 14), (36, 36, 36, 28), 438)],
    ids=["unlike", "a short last stage"],
)
def test_even_stages_of_ranks_that_have_several_are_not_the_fastest(
    forward: tuple[int, ...], backward: tuple[int, ...], least: int
) -> None:
    """What even ones take is no bound of an interleaved schedule, whatever the stages' forward and
    backward are, nor where all have twice as long a backward."""
    messages: dict[Any, float] = {}
    for stage in range(3):
        messages[stage, stage + 1, "forward"] = messages[stage + 1, stage, "backward"] = 0.0
    ways = list(forward), list(backward), [0.0] * 4
    played = play(("interleaved", 2, 2, 4), ways, messages, [0.0] * 4).makespan
    assert played == pytest.approx(least)
    work = sum(forward) + sum(backward)
    assert played < (4 + 1 / 2) / 2 * work
    of = columns([Shape(4, 2, 2, "none", 1, schedule="interleaved")], 4)
    assert 2 * work + least_idle(of, np.array([float(work)]), np.zeros(1)) <= played


def test_what_waits_at_least_between_two_sizes(wide: StepGraph) -> None:
    """Of sizes between the smallest and the largest no cut is asked for; never more than the cut
    says, and of a graph whose bytes grow evenly little less."""
    problem = problem_of(wide, cluster("h100-80gb", 8))
    base = base_plan(Pins(), 8, BATCH, wide.fingerprint, "h100", "loss")
    meshes = list(meshes_of(problem, Pins(), BATCH, Layout()))
    of = columns(meshes, BATCH)
    told = dict(zip(of.small.tolist(), Bounds(problem, base).sums(of).lean.tolist(), strict=True))
    assert len(told) > 3
    profile = problem.layouts.whole
    for size, lean in told.items():
        true = least_saved(profile, profile.sized(size, problem.cluster.device))
        assert 0.95 * true <= lean <= true
    for size in (min(told), max(told)):
        assert told[size] == least_saved(profile, profile.sized(size, problem.cluster.device))


def test_the_first_bytes_cost_least_to_do_without(wide: StepGraph) -> None:
    problem = problem_of(wide, cluster("h100-80gb", 8))
    base = base_plan(Pins(), 8, BATCH, wide.fingerprint, "h100", "loss")
    shares, costs = recompute_curve(Bounds(problem, base), Layout(), 1)
    assert (shares[0], costs[0], shares[-1]) == (0, 0, 1)
    assert 0 < costs[-1] <= 1
    slopes = np.diff(costs) / np.diff(shares)
    assert len(slopes) > 1
    assert (np.diff(slopes) >= -1e-12).all()


def test_what_keeps_no_less_is_solved_later() -> None:
    """Of two candidates one of which rules out the other, the gap is closed with that one first."""
    zeros = [(0, "always", "whole"), (1, "always", "whole"), (2, "always", "shards")]
    zeros += [(3, again, "shards") for again in RESHARDS]
    shapes = [
        Shape(microbatches, 2, each, "", 4, *zero)
        for microbatches in (1, 2, 8)
        for each in (1, 2)
        for zero in zeros
    ]
    pairs = [(more, less) for more in shapes for less in shapes if more.keeps_no_less(less)]
    assert len(pairs) > 2 * len(shapes)
    assert all(fewest_bytes_first(less) <= fewest_bytes_first(more) for more, less in pairs)


def test_what_keeps_no_less() -> None:
    lean = Shape(8, 2, 1, "", 4, zero=2, accumulation="shards")
    for more in (
        {"microbatches": 4}, {"interleave": 2}, {"zero": 1}, {"accumulation": "whole"}, {},
    ):  # fmt: skip
        assert lean._replace(**more).keeps_no_less(lean)
        assert lean._replace(**more) == lean or not lean.keeps_no_less(lean._replace(**more))
    for other in ({"data": 8}, {"pipeline": 4}, {"tensor": 2}, {"schedule": "zero_bubble"}):
        assert not lean._replace(**other).keeps_no_less(lean)
    gathered = lean._replace(zero=3, reshard_after_forward="once_per_step")
    assert gathered.keeps_no_less(gathered._replace(reshard_after_forward="always"))
    assert not gathered._replace(reshard_after_forward="always").keeps_no_less(gathered)
