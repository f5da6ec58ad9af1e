"""Which blocks to compute again, and what that saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.programs import build
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.recompute import Knapsack, block_options, every_second

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


ITEM = st.tuples(st.integers(1, 50), st.integers(0, 20))


@given(st.lists(st.lists(ITEM, max_size=3), min_size=1, max_size=6), st.integers(1, 120))
@settings(deadline=None)
def test_the_cheapest_blocks_that_save_enough(
    blocks: list[list[tuple[int, int]]], needed: int
) -> None:
    """Of each block at most one of its ways."""
    best, chosen = cheapest_of_all(blocks, needed), Knapsack(blocks).cheapest(needed)
    assert (chosen is None) == (best is None)
    if chosen is not None:
        taken = [b[k] for b, k in zip(blocks, chosen, strict=True) if k >= 0]
        assert sum(saving for saving, _ in taken) >= needed
        assert sum(price for _, price in taken) == best


@given(st.lists(st.lists(ITEM, max_size=3), min_size=1, max_size=6), st.integers(1, 120))
@settings(deadline=None)
def test_a_table_where_choices_are_many(blocks: list[list[tuple[int, int]]], needed: int) -> None:
    best, most = cheapest_of_all(blocks, needed), max((p for b in blocks for _, p in b), default=0)
    with patch("graphaccel.planner.search.recompute._ALL", 0):
        chosen = Knapsack(blocks).cheapest(needed)
    assert (chosen is None) == (best is None)
    if chosen is not None:
        taken = [b[k] for b, k in zip(blocks, chosen, strict=True) if k >= 0]
        assert sum(saving for saving, _ in taken) >= needed
        # Rounding to 1/2000 of the need can cost at most one item more.
        assert sum(price for _, price in taken) <= best + most


def cheapest_of_all(blocks: list[list[tuple[int, int]]], needed: int) -> float | None:
    totals = [
        (sum(s for s, _ in taken), sum(p for _, p in taken))
        for taken in product(*([(0, 0), *items] for items in blocks))
    ]
    return min((price for saving, price in totals if saving >= needed), default=None)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=3),
    st.integers(1, 6), st.floats(0.01, 1.0), st.lists(st.lists(ITEM, max_size=2), max_size=2),
)  # fmt: skip
@settings(deadline=None)
def test_many_blocks_that_are_alike(
    steps: list[tuple[int, int]], count: int, share: float, others: list[list[tuple[int, int]]]
) -> None:
    """Each way saves more than the one before it, and takes longer. others: before and after."""
    items = [(float(s), float(p)) for s, p in np.cumsum(steps, axis=0).tolist()]
    blocks = [*others[:1], *[items] * count, *others[1:]]
    needed = sum(max((s for s, _ in own), default=0) for own in blocks) * share
    limits = {"_ALL": 0, "_TABLE": 0}
    with patch.multiple("graphaccel.planner.search.recompute", **limits):
        chosen = Knapsack(blocks).cheapest(needed)
    best = cheapest_of_all(blocks, needed)
    assert chosen is not None
    assert best is not None
    taken = [own[k] for own, k in zip(blocks, chosen, strict=True) if k >= 0]
    assert sum(s for s, _ in taken) >= needed - 1e-9
    assert sum(p for _, p in taken) <= best + items[-1][1]


def test_nothing_needed_is_nothing_chosen() -> None:
    assert Knapsack([[(5, 1.0)], [(6, 1.0)]]).cheapest(0) == [-1, -1]


def test_a_recomputed_block_keeps_only_what_enters_it(captured: Captured, made_up: MadeUp) -> None:
    profile = Profile(captured("gpt"))
    sized = profile.sized(2, made_up(1).device)
    keep, again = sized.saved(profile.no_recomputation)
    assert again.sum() == 0
    inside = profile.block_at == 1
    alone, made_again = sized.saved(profile.saving({1: ()}))
    stream = 2 * 16 * 32 * 4  # the block's input [2, 16, 32]; the first norm reads it as well
    assert alone[inside].sum() == stream
    assert made_again.sum() == keep[inside].sum() - stream
    assert (alone[~inside] == keep[~inside]).all()


def test_identical_blocks_have_identical_options(captured: Captured, made_up: MadeUp) -> None:
    profile = Profile(captured("gpt"))
    options = block_options(profile, profile.sized(2, made_up(1).device))
    assert [own[0].name for own in options] == [f"blocks.{i}" for i in range(4)]
    told = [[(o.saved_bytes, o.seconds, o.saved) for o in own] for own in options]
    assert told == [told[0]] * 4


class Dropping(nn.Module):
    """Two blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 16))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def test_random_results_stay_saved(made_up: MadeUp) -> None:
    profile = Profile(capture(Dropping().train(), flatten_call((torch.randn(8, 16),), {})))
    sized = profile.sized(8, made_up(1).device)
    random = np.flatnonzero(profile.storages.kept & profile.storages.saved)
    assert len(random)
    kept, _, again, _ = profile.saved(profile.full_recomputation)
    assert set(random.tolist()) <= set(kept.tolist())
    assert len(again) > 0  # tanh's result is made again
    assert (
        sized.saved(profile.full_recomputation)[0].sum()
        < sized.saved(profile.no_recomputation)[0].sum()
    )


def test_every_second_block() -> None:
    assert every_second(("a", "b", "c", "d")) == ("b", "d")
    assert every_second(("a",)) == ("a",)
    assert every_second(()) == ()


def test_keys_and_values_are_gathered_again(captured: Captured) -> None:
    """What is gathered along the context is not kept in a block that is computed again."""
    step = captured("llama")
    rates = (("context", (1e6, 1e12, 1e-9, 1e14, 1e-12)),)  # work is dear, sending is cheap
    plan = Plan(devices=2, context=2, batch=step.batch_size, rates=rates, context_by="sequence")
    blocks = tuple(block.name for block in step.blocks)
    kept, again = (build(step, replace(plan, recompute=r)).stages[0] for r in ((), blocks))

    def gathers(graph: fx.GraphModule) -> int:
        inside = (
            n for n in graph.graph.nodes if n.meta.get("module", "").startswith("model.layers")
        )
        return sum("all_gather" in str(n.target) for n in inside)

    assert gathers(kept.forward) == gathers(again.forward) >= 2 * len(blocks)
    assert gathers(kept.backwards[True, True]) == 0
    assert gathers(again.backwards[True, True]) == gathers(again.forward)
    values = again.forward.graph.output_node().args[0]
    saved = [n for n, v in zip(values, again.forward_outputs, strict=True) if v.kind == "saved"]
    inner = [n for n in saved if n.meta.get("module", "").startswith("model.layers")]
    assert [n.name for n in inner if n.args and "all_gather" in str(n.args[0])] == []
