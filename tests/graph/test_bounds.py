"""No bound is above what is predicted, across nodes and for graphs that are not made yet."""

from __future__ import annotations

import pytest
import torch

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.model import without_data
from graphaccel.planner.bounds import Bounds, columns
from graphaccel.planner.candidates import Layout, meshes_of
from graphaccel.planner.cluster import cluster
from graphaccel.planner.estimate import least_moved
from graphaccel.planner.pins import Pins, base_plan
from graphaccel.planner.plan import Plan
from graphaccel.planner.profile import Profile
from graphaccel.planner.solve import with_cuts_and_blocks
from graphaccel.planner.solving import seconds
from graphaccel.planner.wires import wires_of
from tests.graph.test_footprint import problem_of
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
        over_all = wires_of(where, plan).all_reduce(size, axes)
        least = least_moved(profile, plan, where).reduce
        assert 0 < least <= over_all
        alone = wires_of(where, plan).all_reduce(size, ("data",))
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
