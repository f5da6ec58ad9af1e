"""In which order the meshes of many layouts come up."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.planner.search.candidate_queue import CandidateQueue
from graphaccel.planner.search.candidates import Layout, Shape

SECONDS = st.sampled_from([1.0, 2.0, 2.5, 7.0, math.inf, math.nan])  # nan: not looked at
ROWS = st.lists(st.lists(SECONDS, max_size=5), min_size=1, max_size=4)


def meshes(layout: Layout, count: int) -> list[Shape]:
    return [Shape(n + 1, 1, 1, "", 1, tensor=layout.tensor) for n in reversed(range(count))]


def put(queue: CandidateQueue, tensor: int, seconds: list[float]) -> list[tuple[float, Shape]]:
    """What is put of a layout and looked at."""
    own = meshes(Layout(tensor), len(seconds))
    order = np.arange(len(own))[::-1]  # as microbatches
    queue.put(Layout(tensor), own, np.array(seconds), order)
    return [pair for pair in zip(seconds, own, strict=True) if not math.isnan(pair[0])]


def popped(queue: CandidateQueue) -> list[tuple[float, Shape]]:
    found = []
    while (row := queue.pop()) is not None:
        found.append((row.seconds, row.first))
        assert row.meshes[row.index] is row.first
        queue.back(row.rest)
    return found


@given(ROWS)
def test_the_most_promising_of_all_layouts_comes_first(rows: list[list[float]]) -> None:
    queue = CandidateQueue()
    every = [pair for tensor, own in enumerate(rows, 1) for pair in put(queue, tensor, own)]
    assert popped(queue) == sorted(every, key=lambda pair: (pair[0], pair[1].order))


@given(ROWS, st.lists(SECONDS, max_size=5))
def test_what_is_put_again_comes_once(rows: list[list[float]], again: list[float]) -> None:
    queue = CandidateQueue()
    every = [pair for tensor, own in enumerate(rows, 1) for pair in put(queue, tensor, own)]
    queue.pop()  # the rest of it is not put back, but all of the layout
    others = [pair for pair in every if pair[1].tensor != 1]
    first = min(every, default=None, key=lambda pair: (pair[0], pair[1].order))
    gone = 0 if first is None else first[1].tensor
    every = [pair for pair in others if pair[1].tensor != gone] + put(queue, 1, again)
    assert popped(queue) == sorted(every, key=lambda pair: (pair[0], pair[1].order))


def test_rows_that_wait_for_the_others() -> None:
    queue = CandidateQueue()
    put(queue, 1, [3.0, 1.0])
    put(queue, 2, [2.0])
    row = queue.pop()
    assert row is not None
    queue.later(row)
    assert [seconds for seconds, _ in popped(queue)] == [2.0]
    assert queue.return_later()
    assert [seconds for seconds, _ in popped(queue)] == [1.0, 3.0]
    assert not queue.return_later()
