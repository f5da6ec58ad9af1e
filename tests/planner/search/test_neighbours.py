"""Candidates around one, and the meshes of practice."""

from __future__ import annotations

from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.candidates import Shape
from graphaccel.planner.search.neighbours import RECIPES, neighbours, shape_of

SHAPE = Shape(4, 4, 1, "", 8, zero=1, tensor=2, schedule="zero_bubble")


def test_a_factor_of_two_moves_between_axes() -> None:
    found = set(neighbours(SHAPE))
    assert {one.tensor * one.data * one.pipeline * one.context * one.expert for one in found} == {
        64
    }
    assert SHAPE._replace(tensor=4, pipeline=2) in found
    assert SHAPE._replace(data=16, tensor=1, microbatches=2) in found  # of the same size
    assert SHAPE._replace(interleave=2, schedule="interleaved") in found
    assert SHAPE._replace(zero=3, reshard_after_forward="once_per_step") in found
    assert SHAPE._replace(microbatches=8) in found


def test_what_an_axis_leaves_is_settled() -> None:
    flat = {one for one in neighbours(SHAPE._replace(pipeline=2)) if one.pipeline == 1}
    assert {(one.interleave, one.schedule) for one in flat} == {(1, "1f1b")}
    single = {one for one in neighbours(SHAPE._replace(data=2)) if one.data == 1}
    assert {(one.zero, one.shard_size) for one in single} == {(0, 0)}


def test_a_plan_is_its_shape() -> None:
    assert shape_of(SHAPE.on(Plan(64, batch=64))) == SHAPE


def test_every_recipe_is_a_mesh_of_some_shape() -> None:
    """Of 64 devices in nodes of 8, and none of all shapes."""
    shapes = [
        Shape(1, 64 // (tensor * context * expert * data), 1, "", data, zero=zero, tensor=tensor,
              context=context, expert=expert, shard_size=shard)
        for tensor in (1, 4, 8) for context in (1, 2) for expert in (1, 8, 16)
        for data in (1, 4, 8, 64) for zero in (0, 1, 3) for shard in (0, 8)
        if tensor * context * expert * data <= 64
    ]  # fmt: skip
    for recipe in RECIPES:
        held = [shape for shape in shapes if recipe.has(shape, 8)]
        assert 0 < len(held) < len(shapes) / 4, recipe
