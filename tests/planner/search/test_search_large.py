"""Searches too large to solve every candidate: what comes last, and what is not made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel.planner.cluster.cluster import Cluster, Link
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.planner.search import best_first, closing
from graphaccel.planner.search import branch_and_bound as solving
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.reasons import seconds
from graphaccel.planner.search.solve import Problem

MadeUp = Callable[..., Cluster]


def test_stages_of_less_than_a_block_come_last_in_a_large_problem(
    profiles: Layouts, made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not solved where others fit, and stand in what is left open; pinned they are."""
    monkeypatch.setattr(solving, "MANY", 0)
    problem = Problem(profiles, made_up(8, 700), 8, Limits())
    blocks = len(profiles.whole.block_names)
    assert blocks == 4
    solved = solve_all(problem, Pins(), 8)
    assert solved.fitting
    assert all(plan.stages <= blocks for plan in solved.seen)
    assert solved.tally.solved + solved.tally.pruned + solved.tally.impossible == (
        solved.tally.candidates
    )
    asked = solve_all(problem, Pins(pipeline=8), 8)
    assert asked.fitting
    assert all(plan.stages >= 8 for plan in asked.fitting)


def test_larger_tensor_axes_are_left_where_a_small_one_sends_too_much(
    profiles: Layouts, made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large problem they are not even solved, but where nothing else fits."""
    monkeypatch.setattr(solving, "MANY", 0)
    pins, slow = Pins(pipeline=1, zero=0, context=1, expert=1), (Link("inner", 2e-4, 1e9, 8),)

    def solved(kibibytes: int) -> tuple[set[int], set[int]]:
        """Sizes of the tensor axis that fit, and that were solved."""
        own = Layouts(profiles.whole, profiles.shard_graph)
        where = replace(made_up(8, kibibytes), links=slow)
        found = solve_all(Problem(own, where, 8, Limits()), pins, 8)
        return {p.tensor for p in found.fitting}, {p.tensor for p in found.seen}

    assert solved(4000) == ({1, 2}, {1, 2})
    assert solved(400) == ({4}, {4})


def test_what_is_left_open_is_solved_up_to_the_gap(
    profiles: Layouts, made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may take less than the seconds asked for is solved, and only that; nothing is counted
    twice, and what is still open is not below them."""
    problem = Problem(profiles, made_up(8, 700), 8, Limits())
    whole = solve_all(problem, Pins(), 8)
    best = seconds(whole.fitting[0])
    monkeypatch.setattr(solving, "MANY", 0)
    for name in ("_FEW", "_SOLVED", "_NEAR"):
        monkeypatch.setattr(best_first, name, 1)
    found = solve_all(problem, Pins(), 8)
    assert found.open is not None
    first, before = seconds(found.fitting[0]), found.tally.solved
    assert found.open[1] < 0.98 * first
    assert found.rest is not None
    found.rest(0.98 * first, 0.02)
    assert found.tally.solved > before
    assert found.tally.solved + found.tally.pruned + found.tally.impossible == (
        found.tally.candidates
    )
    assert found.open is None or (
        found.open[1] >= 0.978 * seconds(found.fitting[0])  # found to 0.2 %
    )
    assert best <= seconds(found.fitting[0]) <= best / 0.978
    monkeypatch.setattr(closing, "_SOLVED", 0)
    solved = found.tally.solved
    found.rest(first, 0.02)  # too many for that
    assert found.tally.solved == solved
