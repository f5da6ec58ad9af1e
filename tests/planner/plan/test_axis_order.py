"""The order of the mesh axes over the devices: who crosses nodes, what that costs, what is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from math import prod
from typing import Any

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin, ConflictingPins
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    link_between,
    send_seconds,
)
from graphaccel.planner.estimate.estimate import predict, timeline
from graphaccel.planner.estimate.stage_messages import device_number, scatters
from graphaccel.planner.estimate.traffic import traffic
from graphaccel.planner.plan.axis_order import AXES, members
from graphaccel.planner.plan.axis_orders import DATA_OUTSIDE, orders
from graphaccel.planner.plan.conflicts import agreeing_pins
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.read_pins import read_pins
from graphaccel.planner.profile.axis_collectives import collective_costs_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.validate_plan import check_given, misread
from graphaccel.report.compare import comparison

MadeUp = Callable[..., Cluster]
TWO_NODES = cluster("h100-80gb", 16)
"""Two nodes of eight."""


def test_which_axis_crosses_nodes() -> None:
    plan = Plan(16, data=8, pipeline=2)
    assert link_between(TWO_NODES, *_stages(plan)) is TWO_NODES.links[-1]
    assert collective_costs_of(TWO_NODES, plan).group(["data"]) == (8, 1, ())
    other = replace(plan, order=DATA_OUTSIDE)
    assert link_between(TWO_NODES, *_stages(other)) is TWO_NODES.links[0]
    assert collective_costs_of(TWO_NODES, other).group(["data"]) == (8, 2, ())
    size = 1e9
    inside, across = (
        collective_costs_of(TWO_NODES, one).all_reduce(size, ["data"]) for one in (plan, other)
    )
    assert inside == all_reduce_seconds(TWO_NODES, size, 8) < across


def _stages(plan: Plan) -> tuple[int, int]:
    """The devices of the first two stages of a replica."""
    return device_number(plan, 0), device_number(plan, 1)


@pytest.mark.parametrize("order", list(permutations(AXES))[::7])
def test_every_group_is_where_the_devices_are(order: tuple[str, ...]) -> None:
    """Sizes and strides say which devices are in a group, as the ranks of the runtime do."""
    plan = Plan(64, data=4, shard_size=2, pipeline=2, context=2, expert=2, tensor=2, order=order)
    collective_costs = collective_costs_of(TWO_NODES, plan)
    for axes in ({"data"}, {"data", "tensor"}, {"replicate", "context"}, {"shard"}, {"pipeline"}):
        many, apart, further = collective_costs.group(axes)
        numbers = [0]
        for size, step in ((many, apart), *further):
            numbers = [n + step * k for k in range(size) for n in numbers]
        parts = axes | ({"replicate", "shard"} if "data" in axes else set())
        assert sorted(numbers) == members(plan.sizes, parts, {})
        assert len(numbers) == prod(plan.sizes[axis] for axis in parts & set(plan.sizes))


def test_a_group_that_is_not_contiguous_has_fewer_members_in_a_node() -> None:
    """Of 4 x 2 devices with gaps a node of eight has four, and two nodes share what crosses."""
    size = 1e9
    near = all_gather_seconds(TWO_NODES, size, 8)
    spread = all_gather_seconds(TWO_NODES, size, 4, 1, ((2, 8),))
    evenly = all_gather_seconds(TWO_NODES, size, 8, 2)
    assert spread == evenly > near
    with pytest.raises(ValueError, match="4 devices 1 apart and again 5 devices 4 apart"):
        all_gather_seconds(TWO_NODES, size, 4, 1, ((5, 4),))


def test_an_order_changes_seconds_and_no_memory(captured: Callable[[str], StepGraph]) -> None:
    profile = Profile(captured("gpt"))
    plan = Plan(16, data=8, pipeline=2, microbatches=2, batch=64, cuts=_halves(profile), zero=2)
    one, other = (
        predict(profile, replace(plan, order=order), TWO_NODES, 8) for order in (AXES, DATA_OUTSIDE)
    )
    assert one.prediction is not None
    assert other.prediction is not None
    assert one.prediction.memory == other.prediction.memory
    assert one.prediction.compute == other.prediction.compute
    near, far = (
        {(t.axis, t.kind): t for t in traffic(profile, p, TWO_NODES)} for p in (one, other)
    )
    assert near.keys() == far.keys()
    for key, moved in near.items():
        assert (moved.calls, moved.bytes) == (far[key].calls, far[key].bytes)
        if key[0] == "data":
            assert moved.seconds < far[key].seconds
    assert near["pipeline", "send"].seconds > far["pipeline", "send"].seconds
    assert timeline(profile, one, TWO_NODES)[0] == timeline(profile, other, TWO_NODES)[0]


def _halves(profile: Profile) -> tuple[str, ...]:
    return (profile.names[len(profile) // 2],)


def test_messages_cross_where_the_pipeline_reaches_the_next_node() -> None:
    """Inside data, stages 0 to 7 of a pipeline of sixteen share a node; 7 and 8 do not."""
    plan = Plan(32, data=2, pipeline=16, order=DATA_OUTSIDE)
    where = cluster("h100-80gb", 32)
    took = [send_seconds(where, 1e6, device_number(plan, k), device_number(plan, k + 1))
            for k in range(15)]  # fmt: skip
    assert [seconds > min(took) for seconds in took] == [k == 7 for k in range(15)]


def test_sends_in_parts_where_tensor_is_nearer_than_the_pipeline() -> None:
    plan = Plan(16, tensor=4, pipeline=2, data=2)
    assert scatters(plan, TWO_NODES)
    assert not scatters(replace(plan, order=DATA_OUTSIDE), TWO_NODES)
    assert not scatters(replace(plan, order=("tensor", "data", "pipeline", "expert", "context")),
                        TWO_NODES)  # fmt: skip


@pytest.mark.parametrize(
    ("decided", "many"),
    [
        ({"data": 8, "pipeline": 2}, 2),
        ({"data": 2, "pipeline": 2, "tensor": 4}, 2),
        ({"data": 16}, 1),
        ({"pipeline": 16}, 1),
        ({"data": 8, "pipeline": 2, "pinned": ("order",)}, 1),
    ],
)
def test_orders_that_are_offered(decided: Mapping[str, Any], many: int) -> None:
    assert orders(TWO_NODES, Plan(16, **decided)) == (AXES, DATA_OUTSIDE)[:many]
    one_node = cluster("h100-80gb", 8)
    assert orders(one_node, Plan(8, **{**decided, "tensor": 1})) == (AXES,)


def test_where_a_replica_fills_a_node_both_orders_cost_the_same() -> None:
    """And none is offered: pipeline and data both cross."""
    where = cluster("h100-80gb", 64)
    plan = Plan(64, tensor=4, context=2, data=4, pipeline=2)
    assert orders(where, plan) == (AXES,)
    other = replace(plan, order=DATA_OUTSIDE)
    for axes in (["data"], ["data", "tensor"], ["data", "context"], ["data", "context", "tensor"]):
        one, two = (collective_costs_of(where, p).all_reduce(1e8, axes) for p in (plan, other))
        assert one == two
    for one in (plan, other):
        assert link_between(where, *_stages(one)) is where.links[-1]


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (("data", "pipeline"), DATA_OUTSIDE),
        (["data", "pipeline", "tensor"], DATA_OUTSIDE),
        (("pipeline", "data"), AXES),
        (("tensor", "data"), ("expert", "context", "tensor", "pipeline", "data")),
    ],
)
def test_axes_that_an_order_leaves_out_have_one_device(
    captured: Callable[[str], StepGraph], order: Any, found: tuple[str, ...]
) -> None:
    read = read_pins({"order": order}, captured("gpt"), 4, 8, Limits())
    assert read.order == found
    for axis in AXES:
        assert getattr(read, axis) == (None if axis in order else 1)


@pytest.mark.parametrize(
    ("pins", "text"),
    [
        ({"order": ("data", "tenser")}, "tenser is no axis of the mesh"),
        ({"order": ("data", "tensor", "data")}, "data is there twice"),
        ({"order": "data"}, "it is a list of axes, the outermost first"),
        ({"order": ("shard", "pipeline")}, "shard is a part of data, and the parts of data stay "
                                           "together"),
        ({"order": ("data", "pipeline"), "tensor": 2}, "tensor=2 has no place in it"),
    ],
)  # fmt: skip
def test_orders_that_can_not_be(
    captured: Callable[[str], StepGraph], pins: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadPin) as caught:
        read_pins(pins, captured("gpt"), 4, 8, Limits())
    said = pins["order"]
    assert str(caught.value) == (
        f"error[GA202]: order={said!r} can not be planned\n  why:  {text}\n"
        "  help: use one of:  order=('pipeline', 'data', 'expert', 'context', 'tensor')\n"
        "  explain: graphaccel explain GA202"
    )


def test_an_order_against_other_pins(captured: Callable[[str], StepGraph]) -> None:
    pins = {"order": ("data", "pipeline"), "tensor": 2, "microbatches": 2}
    with pytest.raises(ConflictingPins, match="tensor=2 has no place in it") as caught:
        agreeing_pins(pins, captured("gpt"), 4, 8, Limits())
    assert set(caught.value.pins) == {"order", "tensor"}


def test_a_plan_file() -> None:
    plan = Plan(8, data=4, pipeline=2, order=DATA_OUTSIDE, batch=8)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_name(plan) == "data 4 x pipeline 2 in the order data, pipeline"
    check_given(replace(plan, cuts=("relu",)), "plan.json")
    before = json.loads(plan.to_json())
    del before["order"]  # as it was written before there was one
    assert Plan.from_json(json.dumps(before)).order == AXES
    with pytest.raises(ValueError, match=r"order .* is not one of"):
        Plan.from_json(json.dumps({**before, "order": ["data", "data"]}))
    assert misread(replace(plan, order="data")) == (  # type: ignore[arg-type]
        "order is 'data', not tuple[str, ...]"
    )
    assert "order" in comparison(plan, replace(plan, order=AXES), names=("a", "b"))


def test_an_order_of_axes_with_one_device_is_the_usual_one() -> None:
    order = ("tensor", "context", "pipeline", "expert", "data")
    assert plan_name(Plan(8, pipeline=2, data=4, order=order)) == "data 4 x pipeline 2"
    assert Plan(8, tensor=2, data=4, order=order).reordered == ("tensor", "data")
