"""Blocks that save some of their values: which ways there are, and that programs do as is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.errors import BadPin
from graphaccel.ir.text import graph_text
from graphaccel.passes.activations.recompute import recompute
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.planner.cluster.cluster import Cluster, Host
from graphaccel.planner.plan.plan import Plan, Selective
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.profile.block_recompute import BlockKind
from graphaccel.planner.profile.cost import is_view
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.reasons import seconds
from graphaccel.planner.search.recompute import block_options
from graphaccel.planner.search.selective_recompute import MOST, Body, leanest_of, ways_of
from graphaccel.planner.search.solve import excess, with_cuts_and_blocks
from graphaccel.planner.search.validate_plan import check_given
from tests.passes.steps.test_golden import Golden, values
from tests.planner.estimate.test_footprint import problem_of
from tests.support.zoo import ALL

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


def subsets(kind: BlockKind) -> list[tuple[int, ...]]:
    """Every set of positions of a block that saving may mean something for."""
    places = sorted({int(p) for p, fixed in zip(kind.at, kind.fixed, strict=True) if not fixed})
    assert len(places) <= 16
    return [*chain.from_iterable(combinations(places, n) for n in range(len(places) + 1))]


@pytest.mark.parametrize(("name", "size"), [("gpt", 1), ("gpt", 8), ("two blocks", 8)])
def test_minimum_cuts_are_the_best_of_every_set(
    name: str, size: int, captured: Captured, made_up: MadeUp
) -> None:
    """At a price of a second for which a cut is made, no set of values is better; of the ways on
    offer none has another set that takes less of both."""
    profile = Profile(two_blocks()[2] if name == "two blocks" else captured(name))
    sized = profile.sized(size, made_up(1).device)
    assert profile.block_kinds
    found = zip(ways_of(profile, sized), leanest_of(profile, sized), strict=True)
    for kind, (ways, leanest) in zip(profile.block_kinds, found, strict=True):
        body = Body(profile, sized, kind)
        points = [body.point(saved) for saved in subsets(kind)]
        less = 0 if leanest is None else leanest.less
        assert less == max(0, body.kept - min(b for _, b in points))
        assert less == (ways[-1].less if ways else 0)
        for price in (1, 10, 1000, 100_000, 10_000_000):
            ticks, least = body.point(body.cut(price, 1))
            assert ticks + price * least == min(t + price * b for t, b in points)
        assert len(ways) <= MOST + 2
        for way in (w for w in ways if w.saved):
            ticks, least = body.point(way.saved)
            assert not any(t < ticks and b <= least for t, b in points), way


@pytest.mark.parametrize(
    ("name", "decided"),
    [
        ("gpt", {}),
        ("gpt", {"microbatches": 2}),
        ("gpt", {"tensor": 2}),
        ("gpt", {"pipeline": 2, "microbatches": 4}),
        ("gpt", {"data": 2, "zero": 3, "microbatches": 2}),
        ("gpt", {"offload": ("activations",)}),
        ("llama", {"context": 2}),
        ("mixtral", {"expert": 2}),
        ("t5", {"pipeline": 2, "microbatches": 2}),
    ],
)
def test_memory_is_that_of_the_programs(
    name: str, decided: dict[str, Any], captured: Captured, made_up: MadeUp
) -> None:
    """Of every way that the blocks have, whole recomputation among them."""
    plan = Plan(devices=1, batch=8).decided(**decided)
    cluster = made_up(plan.data * plan.pipeline * plan.model_parallel_size, 1 << 20)
    cluster = replace(cluster, host=Host(1 << 30, 1e9, 1e9))
    problem = problem_of(captured(name), cluster)
    plan = with_cuts_and_blocks(problem, plan, "none", None)
    options = block_options(problem.layouts.of(plan), problem.sized(plan))
    module, batch, loss_fn = ALL[name].build()
    compiler = Compiler(Model(module, loss_fn, 2.0), cluster, {})
    assert all(len(own) > 1 for own in options)
    for number in range(max(map(len, options))):
        chosen = {own[min(number, len(own) - 1)] for own in options}
        saved = {o.name: o.saved for o in sorted(chosen, key=lambda o: o.block)}
        tried = problem.predicted(plan.with_recomputed(saved), simulated=False)
        exact, _ = compiler.refine(captured(name), tried, as_batch(batch), captured(name).sizes)
        assert tried.prediction is not None
        assert exact.prediction is not None
        for guess, real in zip(tried.prediction.memory, exact.prediction.memory, strict=True):
            assert guess.tensors == pytest.approx(real.tensors, rel=0.05), saved


@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "vit", "mixtral"])
def test_what_is_done_again_is_what_is_said(name: str, captured: Captured, made_up: MadeUp) -> None:
    """The pass makes the very calls again whose seconds were added up, and no other."""
    step = captured(name)
    profile = Profile(step)
    options = block_options(profile, profile.sized(2, made_up(1).device))
    for number in range(max(map(len, options))):
        saved = {own[0].name: own[min(number, len(own) - 1)].saved for own in options if own}
        plan = Plan(1, batch=step.batch_size).with_recomputed(saved)
        graph = recompute(exact_microbatch(step, plan).graph, plan, step.positions)
        made = [n for n in graph.graph.nodes if n.meta.get("made_by") == "recompute"]
        calls = sorted(n.meta["origin"] for n in made if not is_view(n))
        rows = profile.recomputation(plan).rows
        told = sorted(profile.names[at] for at in profile.node_position[rows].tolist())
        flags = zip(profile.nodes, profile.node_released, strict=True)
        released = {n.meta["origin"] for n, gone in flags if gone}
        assert [c for c in calls if c not in released] == told, saved


class Blocks(nn.Module):
    """Two blocks of a product, its activation and a product: float64 [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (4, 6), (6, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(*sizes[0]), "down": nn.Linear(*sizes[1])})
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](F.gelu(torch.tanh(block["up"](x))))
        return F.cross_entropy(x, labels)


def two_blocks() -> tuple[Blocks, Batch, StepGraph]:
    torch.manual_seed(0)
    model = Blocks().double()
    labels = torch.tensor([0, 1, 3, 2, 1, 0, 2, 0])
    batch = flatten_call((torch.randn(8, 4).double(), labels), {})
    return model, batch, capture(model, batch)


def test_the_pass_makes_again_what_is_not_saved(golden: Golden) -> None:
    model, batch, step = two_blocks()
    before = step.graph(*values(model, batch, step))
    own = Selective(("blocks.0",), ("up linear",))
    plan = Plan(1, selective=(own,), recompute=("blocks.1",), batch=8)
    graph = recompute(exact_microbatch(step, plan).graph, plan, step.positions)
    golden("pass-recompute-selective", graph_text(graph.graph, notes=True))
    after = graph(*values(model, batch, step))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_plan_says_what_is_saved() -> None:
    own = Selective(("h.0", "h.1"), ("mlp.up linear", "add"))
    plan = Plan(1, recompute=("h.2",), selective=(own,))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_name(plan).endswith("recompute 1 blocks, 2 selectively")
    assert plan_name(replace(plan, recompute=())).endswith("recompute 2 blocks selectively")
    assert plan.recomputed == {"h.2": (), "h.0": own.saved, "h.1": own.saved}
    assert Plan(1).with_recomputed(plan.recomputed) == plan
    old = json.loads(Plan(1, recompute=("h.2",)).to_json())
    del old["selective"]
    assert Plan.from_json(json.dumps(old)).selective == ()


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (Selective(("blocks.7",), ("add",)), "blocks.7 is no block"),
        (Selective(("blocks.1",), ("add 9",)), "blocks.1 has no value 'add 9'; it has norm_1"),
        (Selective(("blocks.0",), ("add",)), "blocks.0 is said twice"),
        (Selective(("blocks.1",), ()), "nothing of blocks.1 is saved"),
    ],
)
def test_given_plans_save_what_there_is(own: Selective, reason: str, captured: Captured) -> None:
    plan = Plan(1, recompute=("blocks.0",), selective=(own,), batch=8)
    with pytest.raises(BadPin, match=re.escape(reason)):
        check_given(plan, "given", captured("gpt"))


def test_little_memory_is_met_by_saving_some_values(captured: Captured, made_up: MadeUp) -> None:
    """Where whole blocks would be recomputed, some values of more blocks are: in less time."""
    problem = problem_of(captured("gpt"), made_up(1))
    plan = Plan(1, batch=8)
    peak = {way: tensors(with_cuts_and_blocks(problem, plan, way, None)) for way in ("none", "all")}
    enough = (peak["none"] + peak["all"]) // 2
    device = replace(problem.cluster.device, memory=int(enough * 1.05))
    tight = replace(problem, cluster=replace(problem.cluster, device=device))
    some = with_cuts_and_blocks(tight, plan, "some", None)
    assert some.selective
    whole = [
        tight.predicted(plan.with_recomputed(dict.fromkeys(blocks, ())), simulated=False)
        for size in range(5)
        for blocks in combinations(problem.profile.block_names, size)
    ]
    fastest = min(seconds(one) for one in whole if excess(one, tight.cluster) <= 0)
    assert excess(some, tight.cluster) <= 0
    assert seconds(some) < fastest


def tensors(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(memory.tensors for memory in plan.prediction.memory)
