"""Which blocks to compute again, and what that saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.passes.pipeline import build
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.plan import Plan
from graphaccel.planner.profile import Profile
from graphaccel.planner.recompute import block_options, cheapest, every_second

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(1, 120),
)
@settings(deadline=None)
def test_the_cheapest_blocks_that_save_enough(items: list[tuple[int, int]], needed: int) -> None:
    savings = [saving for saving, _ in items]
    prices = [float(price) for _, price in items]
    chosen = cheapest(savings, prices, needed)
    choices = [
        sum(p for p, taken in zip(prices, flags, strict=True) if taken)
        for flags in product([False, True], repeat=len(items))
        if sum(s for s, taken in zip(savings, flags, strict=True) if taken) >= needed
    ]
    if not choices:
        assert chosen is None
        return
    assert chosen is not None
    assert sum(savings[i] for i in chosen) >= needed
    # Rounding to 1/2000 of the need can cost at most one item more.
    assert sum(prices[i] for i in chosen) <= min(choices) + max(prices)


def test_nothing_needed_is_nothing_chosen() -> None:
    assert cheapest([5, 6], [1.0, 1.0], 0) == []


def test_a_recomputed_block_keeps_only_what_enters_it(captured: Captured, made_up: MadeUp) -> None:
    profile = Profile(captured("gpt"))
    sized = profile.sized(2, made_up(1).device)
    keep, again = sized.saved()
    assert again.sum() == 0
    inside = profile.block_at == 1
    alone, made_again = sized.saved((1,))
    stream = 2 * 16 * 32 * 4  # the block's input [2, 16, 32]; the first norm reads it as well
    assert alone[inside].sum() == stream
    assert made_again.sum() == keep[inside].sum() - stream
    assert (alone[~inside] == keep[~inside]).all()


def test_identical_blocks_have_identical_options(captured: Captured, made_up: MadeUp) -> None:
    profile = Profile(captured("gpt"))
    options = block_options(profile, profile.sized(2, made_up(1).device))
    assert [o.name for o in options] == [f"blocks.{i}" for i in range(4)]
    assert len({o.saved_bytes for o in options}) == 1
    assert [o.seconds for o in options] == pytest.approx([options[0].seconds] * 4)


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
    kept, _, again, _ = profile.saved(range(len(profile.block_names)))
    assert set(random.tolist()) <= set(kept.tolist())
    assert len(again) > 0  # tanh's result is made again
    assert sized.saved(range(2))[0].sum() < sized.saved()[0].sum()


def test_every_second_block() -> None:
    assert every_second(("a", "b", "c", "d")) == ("b", "d")
    assert every_second(("a",)) == ("a",)
    assert every_second(()) == ()


def test_keys_and_values_are_gathered_again(captured: Captured) -> None:
    """What is gathered along the context is not kept in a block that is computed again."""
    step = captured("llama")
    rates = (("context", (1e6, 1e12, 1e-9, 1e14, 1e-12)),)  # work is dear, sending is cheap
    plan = Plan(devices=2, context=2, batch=step.batch_size, rates=rates)
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
