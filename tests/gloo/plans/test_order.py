"""Mesh axes in other orders over the ranks: the step of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from graphaccel.planner.plan.axis_order import AXES, coordinates
from tests.support.captures import observed_once, packed_once
from tests.support.casts import lift_captured_casts
from tests.support.inside import captures_in
from tests.support.parity import Reference, build, compare, reference, run_plan, zoo_captures
from tests.support.pool import Pool
from tests.support.zoo import call

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor, pipeline": (4, {"tensor": 2, "pipeline": 2, "microbatches": 2}),
    "tensor, data": (4, {"tensor": 2, "data": 2, "zero": 3}),
    "data, pipeline": (4, {"data": 2, "pipeline": 2, "zero": 1, "microbatches": 2}),
    "context, data": (4, {"context": 2, "data": 2, "zero": 2}),
    "expert, data": (4, {"expert": 2, "data": 2, "zero": 1}),
    "tensor, data of replicas": (8, {"tensor": 2, "data": 4, "zero": 3, "shard_size": 2}),
    "data of replicas, pipeline": (
        8, {"data": 4, "zero": 2, "shard_size": 2, "pipeline": 2, "microbatches": 2}
    ),
}  # fmt: skip
THREE_AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "context, data, tensor": (8, {"context": 2, "data": 2, "tensor": 2}),
    "data, tensor, pipeline": (8, {"data": 2, "tensor": 2, "pipeline": 2, "microbatches": 2}),
}
CASES = [("gpt", plan) for plan in PLANS if "expert" not in plan]
CASES += [("mixtral", "expert, data"), ("llama", "tensor, pipeline"), ("t5", "data, pipeline")]


def _order(plan: str) -> tuple[str, ...]:
    """The axes of several devices, from the outside in: what the name says."""
    return tuple(plan.replace(" of replicas", "").split(", "))


@cache
def _reference(model: str) -> Reference:
    return reference(model, "float64", 2)


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_one_step_in_float64_is_that_of_one_device(pool: Pool, model: str, plan: str) -> None:
    _check_step(pool, model, plan, *PLANS[plan])


@pytest.mark.parametrize("plan", THREE_AXES)
def test_a_step_on_three_axes(pool: Pool, plan: str) -> None:
    _check_step(pool, "gpt", plan, *THREE_AXES[plan])


def _check_step(pool: Pool, model: str, plan: str, world: int, own: dict[str, Any]) -> None:
    pins = {"zero": 0, "microbatches": 1, "interleave": 1, "recompute": "none", **own}
    got = pool.run(world, run_plan, model, "float64", {**pins, "order": _order(plan)}, 2)
    compare(_reference(model), got).check(1e-10, 1e-10)
    for rank in got:
        assert rank["peak_predicted"] == pytest.approx(rank["peak_measured"], rel=0.02)


def _places(pins: dict[str, Any]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """This rank's coordinates, and the ranks of its group on each axis, as torch has them."""
    import graphaccel

    model, batch, loss_fn = build("gpt", "float64")
    with lift_captured_casts(), observed_once("gpt"), packed_once():
        model = graphaccel.optimize(model, loss_fn=loss_fn, check="off", **pins)
        captures_in(model).steps = zoo_captures("gpt", "float64")
        call(model, batch)
    mesh = model.graphaccel.session.mesh
    axes = [axis for axis in AXES if mesh.sizes[axis] > 1]
    mesh.ensure(axes)
    ranks = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in axes}
    return {axis: mesh.coordinate(axis) for axis in axes}, ranks


def test_neighbours_on_the_innermost_axis_are_neighbouring_ranks(pool: Pool) -> None:
    pins = {"data": 2, "pipeline": 2, "microbatches": 2, "order": ("data", "pipeline")}
    sizes = {"data": 2, "pipeline": 2}
    for rank, (at, ranks) in enumerate(pool.run(4, _places, pins)):
        assert at == coordinates(sizes, rank) == {"data": rank // 2, "pipeline": rank % 2}
        assert ranks["pipeline"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert ranks["data"] == [rank % 2, rank % 2 + 2]
