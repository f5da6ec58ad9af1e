"""ZeRO over a part of the data axis: what is decided, offered, sent and paid for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.programs import build
from graphaccel.errors import BadPin, ConflictingPins, GraphAccelError
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.communication import all_gather_seconds, all_reduce_seconds
from graphaccel.planner.estimate.traffic import traffic
from graphaccel.planner.plan.conflicts import agreeing_pins
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.module_pins import shard
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.read_pins import read_pins
from graphaccel.planner.plan.zero import owned_shards
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.candidates import shard_sizes
from graphaccel.planner.search.validate_plan import check_given
from graphaccel.runtime.mesh import Mesh

c10d = torch.ops._c10d_functional
Captured = Callable[[str], StepGraph]
MESH = {"pipeline": 1, "replicate": 2, "shard": 3, "expert": 1, "context": 1, "tensor": 2}


def test_shards_are_neighbours_and_replicas_apart() -> None:
    mesh = Mesh(9, MESH)  # replicate 1, shard 1, tensor 1
    assert mesh.ranks("shard") == [7, 9, 11]
    assert mesh.ranks("replicate") == [3, 9]
    assert mesh.ranks("data") == mesh.ranks("replicate+shard") == [1, 3, 5, 7, 9, 11]
    assert mesh.ranks("replicate+tensor") == [2, 3, 8, 9]
    assert (mesh.data, mesh.data_index, mesh.coordinate("shard")) == (6, 4, 1)
    assert mesh.joined({"tensor", "shard"}) == "shard+tensor"


def test_a_plan_says_so_and_older_ones_are_read_as_before() -> None:
    plan = Plan(devices=8, data=8, zero=3, shard_size=4, batch=8)
    assert (plan.shards, plan.num_replicas, plan.shard_axis) == (4, 2, "shard")
    assert plan_name(plan) == "data 8 x pipeline 1 · zero 3 in groups of 4"
    assert Plan.from_json(plan.to_json()) == plan
    older = json.loads(replace(plan, shard_size=0).to_json())
    del older["shard_size"]
    read = Plan.from_json(json.dumps(older))
    assert (read.shards, read.num_replicas, read.shard_axis) == (8, 1, "data")


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        ({"shard_size": 1, "zero": 3}, "over one device nothing is sharded"),
        ({"shard_size": 2, "zero": 0}, "with zero=0 nothing is sharded"),
        ({"shard_size": 2, "data": 1}, "with data=1 there is no axis to shard over"),
        ({"shard_size": 4, "data": 2}, "data=2 can not be made of groups of 4"),
        ({"shard_size": 3}, "data=8 can not be made of groups of 3"),
        ({"shard_size": 2.0}, "it is a count of at least 1"),
    ],
)
def test_a_pin_that_can_not_be_is_refused(
    captured: Captured, pins: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadPin, match=reason):
        read_pins(pins, captured("gpt"), 8, 8, Limits())


def test_pins_that_contradict_it_are_named(captured: Captured) -> None:
    with pytest.raises(ConflictingPins) as caught:
        agreeing_pins({"shard_size": 4, "data": 2, "zero": 3}, captured("gpt"), 8, 8, Limits())
    assert dict(caught.value.pins) == {"shard_size": 4, "data": 2}
    assert caught.value.instead == {"shard_size": (2,), "data": (4, 8)}


def test_a_plan_file_says_all_of_the_axis_in_one_way() -> None:
    plan = Plan(devices=4, data=4, zero=3, shard_size=2, batch=4)
    check_given(plan, "plan.json")
    for wrong in (replace(plan, shard_size=4), replace(plan, shard_size=3), replace(plan, zero=0)):
        with pytest.raises(GraphAccelError) as caught:
            check_given(wrong, "plan.json")
        assert isinstance(caught.value, BadPin)
        assert caught.value.pin == "shard_size"


def test_few_devices_are_offered_all_parts_and_many_full_levels() -> None:
    assert shard_sizes(cluster("h100-80gb", 8), 8, 1) == (8, 2, 4)
    many = cluster("h100-80gb", 1024)  # nodes of 8
    assert shard_sizes(many, 1024, 1) == (1024, 8)
    assert shard_sizes(many, 256, 2) == (256, 4)
    assert shard_sizes(many, 128, 8) == (128,)


def test_single_parameters_rest_over_the_part(captured: Captured) -> None:
    step = captured("gpt")
    placed = (("norm.weight", (shard(0, "data"),)),)
    plan = Plan(devices=4, data=4, shard_size=2, batch=4, placements=placed)
    owned, _ = owned_shards(step, plan, {})
    assert {name: own.split for name, own in owned.items()} == {"norm.weight": shard(0, "shard")}


@pytest.mark.parametrize("accumulation", ["whole", "shards"])
def test_replicas_are_summed_in_the_last_microbatch(captured: Captured, accumulation: str) -> None:
    step = captured("gpt")
    plan = Plan(
        devices=4, data=4, zero=3, shard_size=2, microbatches=2, accumulation=accumulation, batch=4
    )
    (stage,) = build(step, plan).stages

    def sent(graph: torch.fx.GraphModule, op: Any) -> list[str]:
        return [str(n.args[-1]) for n in graph.graph.nodes if n.target is op]

    many = len(stage.reduced)
    scatter, total = c10d.reduce_scatter_tensor.default, c10d.all_reduce_.default
    gathers = sent(stage.forward, c10d.all_gather_into_tensor.default)
    assert set(gathers) == {"shard"}
    last, first = stage.backwards[False, True], stage.backwards[True, False]
    assert sent(last, scatter) == ["shard"] * many
    assert sent(last, total) == ["replicate"] * many
    assert sent(first, scatter) == ["shard"] * (many if accumulation == "shards" else 0)
    assert sent(first, total) == []
    nodes = list(last.graph.nodes)
    in_flight = [nodes.index(n) for n in nodes if n.target is total]
    waits = [nodes.index(next(iter(nodes[at].users))) for at in in_flight]
    assert all(w > f for w, f in zip(waits, in_flight, strict=True))
    assert waits[0] > nodes.index([n for n in nodes if n.target is scatter][2])  # meanwhile


def test_what_is_sent_and_over_which_links(captured: Captured) -> None:
    """Whole gradients and parameters within a node, an eighth of the gradients between nodes."""
    step, where = captured("gpt"), cluster("h100-80gb", 16)
    plan = Plan(devices=16, data=16, zero=3, shard_size=8, reshard_after_forward="never", batch=16)
    rows = {(t.axis, t.kind): t for t in traffic(Profile(step), plan, where)}
    scattered = rows["shard", "reduce-scatter"]
    gathered, summed = rows["shard", "all-gather"], rows["replicate", "all-reduce"]
    assert len(rows) == 3
    assert scattered.bytes == gathered.bytes == 8 * summed.bytes
    each = summed.bytes / summed.calls
    between = all_reduce_seconds(where, each, 2, 8)
    assert summed.seconds == pytest.approx(summed.calls * between)
    many, block = cluster("h100-80gb", 1024), 400 << 20
    assert all_gather_seconds(many, block, 8) < all_gather_seconds(many, block, 1024) / 2
