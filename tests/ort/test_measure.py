"""What regions cost alone, and what is left of their gain in a whole step."""

from __future__ import annotations

import pytest

from graphaccel.ort.measure import RegionCost, in_step

COSTS = [
    RegionCost("a", "first", "forward", 3, torch=0.010, ort=0.006),
    RegionCost("b", "second", "forward", 3, torch=0.010, ort=0.020),
]


def test_what_the_step_gains_less_is_added_to_each_call() -> None:
    # two calls promise 8 ms, the step gains 2
    costs = in_step(
        COSTS, {"a": 2}, without=[0.100, 0.101, 0.0995], with_regions=[0.098, 0.097, 0.0985]
    )
    assert costs[0].ort == pytest.approx(0.009)
    assert costs[1] == COSTS[1]


def test_a_gain_that_chance_may_make_is_none() -> None:
    costs = in_step(
        COSTS, {"a": 2}, without=[0.100, 0.090, 0.101], with_regions=[0.0895, 0.080, 0.081]
    )
    assert costs[0].ort == costs[0].torch
    assert not any(cost.wins for cost in costs)


def test_a_step_that_keeps_the_promise_leaves_costs_as_they_are() -> None:
    assert in_step(COSTS, {"a": 2}, without=[0.1] * 3, with_regions=[0.091] * 3) == COSTS
