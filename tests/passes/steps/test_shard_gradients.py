"""Programs under ZeRO: how many collectives, where they stand, and what the forward keeps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.programs import build
from graphaccel.errors import BadPin, InfeasiblePlan
from graphaccel.ir.program import Sharded, StageProgram
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.module_pins import replicate, shard
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.zero import data_dim, owned_shards
from graphaccel.planner.search.search import search

c10d = torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
WAIT = c10d.wait_tensor.default
Captured = Callable[[str], StepGraph]


def _stage(step: StepGraph, **decisions: Any) -> StageProgram:
    plan = Plan(devices=2, data=2, batch=step.batch_size, **decisions)
    return build(step, plan).stages[0]


def _groups(graph: fx.GraphModule, target: Any) -> Counter[str]:
    """How often each group (by its flat placeholder or tensor) is in a collective."""
    return Counter(n.args[0].name for n in graph.graph.nodes if n.target is target)


def _sent(graph: fx.GraphModule, target: Any) -> int:
    """Numbers of the whole tensors that these collectives gather or scatter."""
    found = [n for n in graph.graph.nodes if n.target is target]
    return sum((n if target is GATHER else n.args[0]).meta["val"].numel() for n in found)


def _parameters(step: StepGraph) -> list[tuple[fx.Node, Any]]:
    nodes = step.graph.graph.find_nodes(op="placeholder")
    return [(n, s) for n, s in zip(nodes, step.inputs, strict=True) if s.kind == "parameter"]


def _count(graph: fx.GraphModule, target: Any) -> int:
    return sum(n.target is target for n in graph.graph.nodes)


def test_two_gathers_and_one_reduce_scatter_a_block(captured: Captured) -> None:
    stage = _stage(captured("gpt"), zero=3)
    backward = stage.backwards[True, True]
    blocks = [g for g in stage.groups if g[0].startswith("blocks.")]
    assert [len(g) for g in blocks] == [12] * 4
    assert len({n.split(".")[1] for n in blocks[1]}) == 1
    rest = sorted(n for g in stage.groups if g not in blocks for n in g)
    assert rest == ["norm.bias", "norm.weight", "position.weight", "token.weight"]
    # blocks; position; norm; the tied weight for the embedding and for the head
    assert _count(stage.forward, GATHER) == 4 + 1 + 1 + 2
    # blocks again: what follows the last block is kept, and an embedding's backward reads nothing
    assert _count(backward, GATHER) == 4
    assert set(_groups(backward, GATHER).values()) == {1}
    assert stage.reduced == stage.groups
    assert _count(backward, SCATTER) == len(stage.groups)
    # Every parameter travels once in each of them, and the tied one for each of its uses.
    sizes = {s.name: n.meta["val"].numel() for n, s in _parameters(captured("gpt"))}
    inside = sum(n for name, n in sizes.items() if name.startswith("blocks."))
    assert _sent(stage.forward, GATHER) == sum(sizes.values()) + sizes["token.weight"]
    assert _sent(backward, GATHER) == inside
    assert _sent(backward, SCATTER) == sum(sizes.values())
    for graph in (stage.forward, backward):
        assert _count(graph, WAIT) == _count(graph, GATHER) + _count(graph, SCATTER)


def test_without_gathering_again_there_is_one(captured: Captured) -> None:
    stage = _stage(captured("gpt"), zero=3, reshard_after_forward="never")
    assert _count(stage.forward, GATHER) == 8
    assert _count(stage.backwards[True, True], GATHER) == 0


def test_cast_parameters_travel_in_bf16(captured: Captured) -> None:
    """All but what the last stage keeps for its backward; under autocast norms want float32."""
    step = captured("gpt")
    found = {}
    for name in ("bf16", "bf16-params"):
        stage = _stage(step, zero=3, precision=PRECISIONS[name])
        for graph in (stage.forward, stage.backwards[True, True]):
            kinds = [n.meta["val"].dtype for n in graph.graph.nodes if n.target is GATHER]
            found.setdefault(name, []).append(kinds)
    low, wide = torch.bfloat16, torch.float32
    assert all(kinds == [wide] * len(kinds) for kinds in found["bf16"])
    forward, backward = found["bf16-params"]
    assert len(forward) == 8  # as in float32: the tied weight for the embedding and for the head
    assert forward == [low] * 6 + [wide] * 2  # the last norm, and the head
    assert backward == [low] * len(backward)


@pytest.mark.parametrize(("accumulation", "each"), [("whole", 0), ("shards", 7)])
def test_gradients_are_reduced_as_the_plan_says(
    captured: Captured, accumulation: str, each: int
) -> None:
    stage = _stage(captured("gpt"), zero=3, microbatches=4, accumulation=accumulation)
    found = {moment: _count(g, SCATTER) for moment, g in stage.backwards.items()}
    assert found == {(True, False): each, (False, False): each, (False, True): 7}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_gathers_travel_while_the_group_before_computes(captured: Captured, phase: str) -> None:
    stage = _stage(captured("gpt"), zero=3)
    graph = stage.forward if phase == "forward" else stage.backwards[True, True]
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    gathers = [n for n in order if n.target is GATHER]
    waits = {n.args[0]: n for n in order if n.target is WAIT}
    for before, gather in itertools.pairwise(gathers):
        assert order[gather] < order[waits[before]] < order[waits[gather]]
    products = [
        n for n in order if "addmm" in str(n.target) or n.target is torch.ops.aten.mm.default
    ]
    middle = gathers[len(gathers) // 2]
    assert any(order[middle] < order[p] < order[waits[middle]] for p in products)


def test_reduce_scatters_are_waited_for_when_the_next_one_starts(captured: Captured) -> None:
    graph = _stage(captured("gpt"), zero=2).backwards[True, True]
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    sent = [n for n in order if n.target is SCATTER]
    waits = {n.args[0]: n for n in order if n.target is WAIT}
    for before, scatter in itertools.pairwise(sent):
        assert order[scatter] < order[waits[before]] < order[waits[scatter]]


@pytest.mark.parametrize("model", ["gpt", "llama", "resnet"])
def test_the_forward_keeps_nothing_of_what_it_gathered(captured: Captured, model: str) -> None:
    def saved(**decisions: Any) -> set[str]:
        return {v.name for v in _stage(captured(model), **decisions).forward_outputs
                if v.kind == "saved"}  # fmt: skip

    whole, sharded = saved(), saved(zero=3)
    views = {name for name in whole if name == "t" or name.startswith("t_")}
    assert {n for n in sharded if not n.startswith("whole ")} <= whole - views


def test_level_two_reduces_in_buckets_and_gathers_nothing(captured: Captured) -> None:
    stage = _stage(captured("gpt"), zero=2, bucket_bytes=1 << 15)
    assert stage.groups == ()
    assert len(stage.reduced) > 2
    assert _count(stage.forward, GATHER) == 0
    assert stage.buckets == ()


def test_level_one_is_plain_data_parallel_inside_the_step(captured: Captured) -> None:
    step = captured("gpt")
    one, none = _stage(step, zero=1), _stage(step)
    assert one.buckets == none.buckets
    assert one.reduced == one.groups == ()


def test_dims(captured: Captured) -> None:
    plan = Plan(devices=4, data=4)
    assert data_dim((8, 3), (), plan, 4) == 0
    assert data_dim((7, 8), (), plan, 4) == 1
    assert data_dim((7, 3), (), plan, 4) is None
    assert data_dim((), (), plan, 4) is None
    fused = (Sharded("tensor", 0, outer=3),)
    assert data_dim((24, 8), fused, Plan(devices=8, data=4, tensor=2), 4) == 1
    assert data_dim((31, 33), (), plan, 4) == 1  # padded: at least 8 positions a rank
    assert data_dim((33, 32), (), plan, 4) == 1
    split = (Sharded("tensor", 0),)
    assert data_dim((66, 31), split, Plan(devices=8, data=4, tensor=2), 4) is None


def test_pinned_parameters_rest_as_the_user_says(captured: Captured) -> None:
    step = captured("gpt")
    pins = (("norm.weight", replicate()), ("token.weight", (shard(1, "data"),)))
    owned, whole = owned_shards(step, Plan(devices=2, data=2, zero=1, placements=pins), {})
    assert "norm.weight" not in owned
    assert (owned["token.weight"].level, owned["token.weight"].split.dim) == (3, 1)
    assert owned["norm.bias"].level == 1
    assert whole == {}
    stage = _stage(step, placements=pins[1:])
    assert stage.groups == (("token.weight",),)


def test_a_pinned_dim_that_does_not_divide(captured: Captured) -> None:
    pins = (("token.weight", (shard(0, "data"),)),)
    with pytest.raises(BadPin, match=r"dim 0 of token.weight \[96, 32\] can not be shared evenly"):
        owned_shards(captured("gpt"), Plan(devices=13, data=13, placements=pins), {})
    owned, _ = owned_shards(captured("gpt"), Plan(devices=5, data=5, placements=pins), {})
    assert owned["token.weight"].split.local((96, 32), 5) == (20, 32)


def test_more_is_sharded_where_nothing_fits_without(
    captured: Captured, made_up: Callable[..., Cluster]
) -> None:
    wanted = {"microbatches": 1, "recompute": "none", "pipeline": 1}
    step = captured("gpt")

    def least(**pins: int) -> int:
        """KiB of the smallest device on which a plan fits."""
        kib = 1600
        try:
            while kib:
                plan = search(step, made_up(4, kib), pins=wanted | pins, optimizer_bytes=8)
                assert set(plan.pinned) == {*wanted, *pins}
                kib -= 100
        except InfeasiblePlan:
            pass
        return kib + 100

    sizes = [least(zero=zero) for zero in (0, 1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == least()
    with pytest.raises(InfeasiblePlan, match="zero 3"):
        search(step, made_up(4, sizes[-1] - 100), pins=wanted, optimizer_bytes=8)
