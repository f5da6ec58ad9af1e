"""Variable elimination against trying every assignment."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphaccel.sharding.solve import variable_elimination as eliminate
from graphaccel.sharding.solve.variable_elimination import Table, cheapest_assignment


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Table]]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    tables = []
    for _ in range(draw(st.integers(0, 8))):
        size = draw(st.integers(1, min(3, len(counts))))
        variables = tuple(draw(st.permutations(range(len(counts))))[:size])
        shape = [counts[v] for v in variables]
        costs = draw(
            st.lists(
                st.sampled_from([0.0, 1.0, 2.0, 5.0, float("inf")]),
                min_size=int(np.prod(shape)),
                max_size=int(np.prod(shape)),
            )
        )
        tables.append(Table(variables, np.array(costs).reshape(shape)))
    return counts, tables


def cost(tables: list[Table], values: tuple[int, ...]) -> float:
    return sum(float(t.costs[tuple(values[v] for v in t.variables)]) for t in tables)


@given(problems(), st.sampled_from([1, 4, eliminate._LARGE]))
@settings(max_examples=400, deadline=None)
def test_equals_brute_force(problem: tuple[list[int], list[Table]], large: int) -> None:
    """large: of tables from which on values are dropped."""
    counts, tables = problem
    best = min(cost(tables, v) for v in itertools.product(*(range(c) for c in counts)))
    if best == float("inf"):
        with mock.patch.object(eliminate, "_LARGE", large):
            with pytest.raises(ValueError, match="no assignment"):
                cheapest_assignment(counts, tables)
        return
    with mock.patch.object(eliminate, "_LARGE", large):
        found = cheapest_assignment(counts, tables)
    assert found.cost == best
    assert cost(tables, tuple(found.values[i] for i in range(len(counts)))) == best
    assert not found.guessed


def test_says_what_it_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clique too large for its tables: still an assignment, and its cost is not called exact."""
    monkeypatch.setattr(eliminate, "LARGEST", 8)
    rng = np.random.default_rng(0)
    pairs = itertools.combinations(range(5), 2)
    tables = [Table(pair, rng.random((3, 3))) for pair in pairs]
    found = cheapest_assignment([3] * 5, tables)
    assert found.guessed
    assert found.cost == cost(tables, tuple(found.values[i] for i in range(5)))


def test_what_many_read_is_solved_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five variables read by all of a chain: the tables would be too large, but for the values that
    can not be best."""
    monkeypatch.setattr(eliminate, "LARGEST", 1 << 8)
    monkeypatch.setattr(eliminate, "_LARGE", 1 << 4)
    rng = np.random.default_rng(0)
    hubs, chain = range(5), range(5, 25)
    own = np.array([0.0, 5.0, 5.0, 9.0])
    tables = [Table((h,), own * len(chain)) for h in hubs]
    tables += [Table((h, v), rng.random((4, 4))) for h in hubs for v in chain]
    tables += [Table(pair, rng.random((4, 4))) for pair in itertools.pairwise(chain)]
    found = cheapest_assignment([4] * 25, tables)
    assert not found.guessed
    assert [found.values[h] for h in hubs] == [0] * 5
