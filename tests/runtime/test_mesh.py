"""Which rank stands where on a mesh, and which arguments of a graph depend on it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.errors import BadPin
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.axis_order import AXES, coordinates, number_of, stride
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.read_pins import read_pins
from graphaccel.planner.profile.layout_profiles import Layouts, LocalGraph, rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.search import search
from graphaccel.runtime.bind import bind
from graphaccel.runtime.mesh import Mesh, axes_of


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    """Sizes of the axes, in any order."""
    return {axis: draw(st.integers(1, 3)) for axis in draw(st.permutations(AXES))}


sizes = meshes()


@given(sizes, st.data())
def test_the_last_axis_is_the_innermost(size: dict[str, int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, prod(size.values()) - 1))
    at = coordinates(size, rank)
    a, b, c, d, e = (at[axis] for axis in size)
    _, two, three, four, five = size.values()
    assert rank == (((a * two + b) * three + c) * four + d) * five + e
    assert number_of(size, at) == rank
    for axis in size:
        if at[axis]:
            assert rank - number_of(size, {**at, axis: at[axis] - 1}) == stride(size, axis)


def test_the_tensor_axis_is_the_innermost_unless_said_otherwise() -> None:
    plan = Plan(32, pipeline=2, data=2, expert=2, context=2, tensor=2)
    assert tuple(plan.sizes) == ("pipeline", "data", "expert", "context", "tensor")
    other = replace(plan, order=("tensor", "data", "expert", "context", "pipeline"), shard_size=1)
    assert tuple(other.sizes) == ("tensor", "replicate", "shard", "expert", "context", "pipeline")
    assert [other.stride(axis) for axis in ("tensor", "data", "pipeline")] == [16, 8, 1]


@given(sizes, st.data())
def test_ranks_of_a_group_differ_on_its_axes_only(
    size: dict[str, int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, prod(size.values()) - 1))
    chosen = data.draw(st.lists(st.sampled_from(AXES), min_size=1, unique=True))
    name = "+".join(chosen)  # in any order
    mesh = Mesh(rank, size)
    ranks = mesh.ranks(name)
    assert len(ranks) == len(set(ranks)) == mesh.size(name)
    assert ranks[mesh.coordinate(name)] == rank
    for other in ranks:
        there = coordinates(size, other)
        assert all(there[a] == coordinates(size, rank)[a] for a in AXES if a not in chosen)


@given(sizes, st.data())
def test_stages_of_a_replica_lie_at_the_same_other_coordinates(
    size: dict[str, int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, prod(size.values()) - 1))
    mesh = Mesh(rank, size)
    assert [mesh.rank_of(s) for s in range(mesh.pipeline)] == mesh.ranks("pipeline")
    assert mesh.rank_of(mesh.pipeline_index) == rank


def test_names_of_axes() -> None:
    assert axes_of("data+tensor") == ("data", "tensor")
    assert axes_of("sum") == axes_of("data+sum") == axes_of(3) == axes_of("") == ()


@pytest.mark.parametrize(
    ("pins", "name"),
    [
        ({"tensor": 2}, "data 2 x tensor 2 x pipeline 1"),
        (
            {"tensor": 2, "pipeline": 2, "interleave": 1},
            "data 1 x tensor 2 x pipeline 2, zero bubble",
        ),
        ({"data": 1, "context": 4}, "data 1 x context 4 x pipeline 1"),
        ({"expert": 2, "zero": 3}, "data 2 x expert 2 x pipeline 1 · zero 3"),
    ],
)
def test_pinned_axes_leave_the_rest_to_the_search(
    captured: Callable[[str], StepGraph],
    made_up: Callable[..., Cluster],
    pins: dict[str, Any],
    name: str,
) -> None:
    wanted = {"microbatches": 1, "recompute": "none", "pipeline": 1, "zero": 0} | pins
    step, cluster = captured("gpt"), made_up(4, 1 << 20)

    def shard_graph(plan: Plan) -> LocalGraph:
        return sharded_graph(step, replace(plan, rates=rates_of(cluster, plan)))

    profiles = Layouts(Profile(step), shard_graph)
    plan = search(step, cluster, pins=wanted, optimizer_bytes=8, profiles=profiles)
    assert plan_name(plan) == name
    assert prod(plan.mesh.values()) == 4


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        (
            {"data": 2, "tensor": 4},
            "data=2 can not be planned\n  why:  data 2 x tensor 4 is 8, not 4 devices\n"
            "  help: use one of:  data=1",
        ),
        (
            {"data": 1, "tensor": 2, "pipeline": 1},
            "data=1 can not be planned\n  why:  data 1 x tensor 2 x pipeline 1 is 2, not 4 "
            "devices\n  help: use one of:  data=2",
        ),
        (
            {"tensor": 4, "context": 2},
            "tensor=4 can not be planned\n  why:  context 2 x tensor 4 is 8, not 4 devices\n"
            "  help: leave tensor out and it will be chosen for you",
        ),
        (
            {"tensor": 3},
            "tensor=3 can not be planned\n  why:  4 devices can not be shared evenly by 3\n"
            "  help: use one of:  tensor=1  tensor=2  tensor=4",
        ),
        (
            {"zero": 1, "pipeline": 2, "tensor": 2},
            "zero=1 can not be planned\n  why:  with data=1 there is no axis to shard over\n"
            "  help: use one of:  zero=0",
        ),
    ],
)
def test_a_mesh_that_does_not_match_the_devices(
    captured: Callable[[str], StepGraph], pins: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadPin) as caught:
        read_pins(pins, captured("gpt"), 4, 8, Limits())
    assert str(caught.value) == f"error[GA202]: {text}\n  explain: graphaccel explain GA202"


def test_a_graph_is_bound_to_the_rank_it_runs_on() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    own = graph.call_function(torch.ops.aten.narrow.default, (x, 0, 0, 3))
    own.meta["bind"] = {2: ("data+tensor", 3)}
    graph.output(own)
    module = fx.GraphModule({}, graph)
    size = {"pipeline": 1, "data": 2, "expert": 1, "context": 1, "tensor": 2}
    for rank in (3, 1):  # the same graph again
        bind(module, Mesh(rank, size))
        assert module(torch.arange(12)).tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]


def test_gloo_gathers_into_memory_that_is_there() -> None:
    """Its coalesced all-gather writes over freed memory where several are on their way."""
    graph, c10d, aten = fx.Graph(), torch.ops._c10d_functional, torch.ops.aten
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.empty(2, 3), torch.empty(5)
    one = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "tensor"))
    one.meta["val"] = torch.empty(4, 3)
    two = graph.call_function(c10d.all_gather_into_tensor_coalesced.default, ([x, y], 2, "tensor"))
    two.meta["val"] = [torch.empty(4, 3), torch.empty(10)]
    parts = [graph.call_function(operator.getitem, (two, k)) for k in (0, 1)]
    graph.output([one, *parts])
    module = fx.GraphModule({}, graph)
    size = {"pipeline": 1, "data": 1, "expert": 1, "context": 1, "tensor": 2}
    bind(module, Mesh(1, size, groups={"tensor": SimpleNamespace(group_name="group")}))
    nodes = list(module.graph.nodes)
    made = [n for n in nodes if n.target is aten.new_empty.default]
    assert [list(n.args[1]) for n in made] == [[4, 3], [4, 3], [10]]
    assert list(module.graph.output_node().args[0]) == made
    own = [n for n in nodes if n.target is aten.copy_.default]
    assert [n.args[0].args[1:] for n in own] == [(0, 2, 2), (0, 2, 2), (0, 5, 5)]
    sent = [n for n in nodes if n.target is c10d.broadcast_.default]
    assert [n.args[1:] for n in sent] == [(0, "group"), (1, "group")] * 3
    assert not any("all_gather" in str(n.target) for n in nodes)
