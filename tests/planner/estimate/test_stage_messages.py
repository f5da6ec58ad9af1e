"""Sends in parts: which values, how many bytes, and when the planner chooses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.compiler.programs import build
from graphaccel.errors import BadPin
from graphaccel.ir.program import StepProgram
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.estimate import predict_seconds
from graphaccel.planner.estimate.stage_messages import message_bytes, scatters
from graphaccel.planner.estimate.traffic import traffic
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.read_pins import read_pins
from graphaccel.planner.profile.layout_profiles import Layouts, rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.solve import Problem, with_cuts_and_blocks

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


def problem_of(step: StepGraph, cluster: Cluster) -> Problem:
    def shard_graph(plan: Plan) -> object:
        return sharded_graph(step, replace(plan, rates=rates_of(cluster, plan)))

    return Problem(Layouts(Profile(step), shard_graph), cluster, 8, Limits())


def planned(problem: Problem, **decided: object) -> Plan:
    pinned = ("scatter_sends",) if "scatter_sends" in decided else ()
    plan = Plan(problem.cluster.count, batch=8, pinned=pinned).decided(**decided)
    return with_cuts_and_blocks(problem, plan, "none", None)


def messages(program: StepProgram) -> Counter[tuple[int, int, str]]:
    """Bytes of what each stage's graphs are given by others."""
    found: Counter[tuple[int, int, str]] = Counter()
    for stage in program.stages:
        for way, graph, values in (
            ("forward", stage.forward, stage.forward_inputs),
            ("backward", next(iter(stage.backwards.values())), stage.backward_inputs),
        ):
            nodes = graph.graph.find_nodes(op="placeholder")
            for node, value in zip(nodes, values, strict=True):
                if value.kind == "received":
                    found[value.peers[0], stage.stage, way] += node.meta["val"].nbytes
    return found


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_messages_are_as_predicted_and_smaller(
    name: str, captured: Captured, made_up: MadeUp
) -> None:
    step = captured(name)
    problem = problem_of(step, made_up(4, 1 << 30))
    shape = {"tensor": 2, "pipeline": 2, "microbatches": 2, "sequence": False}
    sizes = {}
    for parts in (False, True):
        plan = planned(problem, **shape, scatter_sends=parts)
        plan = replace(plan, rates=rates_of(problem.cluster, plan))
        found = messages(build(step, plan))
        told = message_bytes(problem.layouts.of(plan), problem.sized(plan), plan)
        assert told[0, 1, "forward"] == found[0, 1, "forward"]
        sizes[parts] = found
    assert sizes[True][0, 1, "forward"] < sizes[False][0, 1, "forward"]
    for key, size in sizes[False].items():
        assert sizes[True][key] <= size <= 2 * sizes[True][key]


def test_what_only_its_rank_has_is_sent_whole(captured: Captured, made_up: MadeUp) -> None:
    """After a block there is its sum, and nothing else; inside of one a rank has its own heads."""
    step = captured("gpt")
    problem = problem_of(step, made_up(4, 1 << 30))
    shape = {"tensor": 2, "pipeline": 2, "microbatches": 2, "sequence": False}
    found = {}
    for cut in ("add_4", "scaled_dot_product_attention_1"):
        for parts in (False, True):
            plan = replace(planned(problem, **shape, scatter_sends=parts), cuts=(cut,))
            plan = replace(plan, rates=rates_of(problem.cluster, plan))
            found[cut, parts] = messages(build(step, plan))[0, 1, "forward"]
    stream, heads = 4 * 16 * 32 * 4, 4 * 2 * 16 * 8 * 4
    assert found["add_4", False] == stream
    assert found["add_4", True] == stream // 2
    assert found["scaled_dot_product_attention_1", False] == stream + heads
    assert found["scaled_dot_product_attention_1", True] == stream // 2 + heads


def test_parts_are_chosen_where_stages_are_further_apart_than_tensor_ranks(
    captured: Captured, made_up: MadeUp
) -> None:
    step = captured("gpt")
    problem = problem_of(step, made_up(8, 1 << 30))  # the inner links hold four devices
    shape = {"tensor": 2, "microbatches": 2, "sequence": False}
    apart = planned(problem, pipeline=4, **shape)
    cuts = "add_2", "add_4", "add_6"
    apart = replace(apart, cuts=cuts)
    assert apart.scatter_sends
    whole = replace(apart, scatter_sends=False)
    profile = problem.layouts.of(apart)
    seconds = [
        predict_seconds(profile, p, problem.cluster, 8).communication for p in (apart, whole)
    ]
    assert seconds[0] < seconds[1]
    sent = [
        next(t for t in traffic(profile, p, problem.cluster) if t.axis == "pipeline")
        for p in (apart, whole)
    ]
    assert 2 * sent[0].bytes == sent[1].bytes
    near = replace(apart, pipeline=2, cuts=())
    assert not scatters(near, made_up(4, 1 << 30))
    assert not scatters(replace(apart, tensor=1), problem.cluster)


def test_nothing_is_chosen_where_nothing_is_alike(captured: Captured, made_up: MadeUp) -> None:
    """A sequence that is sharded stays so from stage to stage."""
    inner, outer = made_up(4).links
    fast = replace(inner, size=2, bandwidth=4e9)  # with slow ones whole and sharded are as good
    cluster = replace(made_up(4, 1 << 30), links=(fast, outer))
    problem = problem_of(captured("gpt"), cluster)
    plan = Plan(4, batch=4, tensor=2, pipeline=2, microbatches=2)
    cuts = ("add_4",)
    assert not with_cuts_and_blocks(problem, plan, "none", cuts).scatter_sends
    plan = replace(plan, sequence=False)
    assert with_cuts_and_blocks(problem, plan, "none", cuts).scatter_sends


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        ({"scatter_sends": 1}, "it is true or false"),
        ({"scatter_sends": True, "tensor": 1}, "with tensor=1 there is nothing to send in parts"),
        (
            {"scatter_sends": True, "pipeline": 1},
            "with pipeline=1 there is nothing to send in parts",
        ),
    ],
)
def test_pins_that_can_not_be(pins: dict[str, object], told: str, captured: Captured) -> None:
    with pytest.raises(BadPin) as caught:
        read_pins(pins, captured("gpt"), 8, 8, Limits())
    assert told in str(caught.value)
