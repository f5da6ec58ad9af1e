"""Blocks that save some of their values: which ways there are, and that programs do as is said."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.planner.again import BlockKind
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.profile import Profile
from graphaccel.planner.selective import MOST, _Body, ways_of

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


def subsets(kind: BlockKind) -> list[tuple[int, ...]]:
    """Every set of positions of a block that saving may mean something for."""
    places = sorted({int(p) for p, fixed in zip(kind.at, kind.fixed, strict=True) if not fixed})
    return [*chain.from_iterable(combinations(places, n) for n in range(len(places) + 1))]


@pytest.mark.parametrize("name", ["gpt", "llama", "mlp"])
@pytest.mark.parametrize("size", [1, 8])
def test_minimum_cuts_are_the_best_of_every_set(
    name: str, size: int, captured: Captured, made_up: MadeUp
) -> None:
    """At a price of a second for which a cut was made, no set of values is better; the ways on
    offer are among the best, and none of them has another that takes less of both."""
    profile = Profile(captured(name))
    sized = profile.sized(size, made_up(1).device)
    assert profile.block_kinds
    for kind, ways in zip(profile.block_kinds, ways_of(profile, sized), strict=True):
        every = subsets(kind)
        if len(every) > 1 << 12:
            pytest.skip(f"{len(every)} sets of values are too many to try")
        body = _Body(profile, sized, kind)
        points = [body.point(saved) for saved in every]
        for price in (1, 10, 1000, 100_000, 10_000_000):
            ticks, least = body.point(body.cut(price, 1))
            assert ticks + price * least == min(t + price * b for t, b in points)
        assert len(ways) <= MOST + 2
        for way in ways:
            ticks, least = body.point(way.saved)
            if way.saved:
                assert not any(t < ticks and b <= least for t, b in points), way
