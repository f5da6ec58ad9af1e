"""More processes than cores: who computes gets an equal share, who waits none."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphaccel.planner.estimate.cpu_oversubscription import shared_makespan
from graphaccel.planner.estimate.simulate import play

Edge = tuple[int, int, str]


def edges_of(stages: int) -> list[Edge]:
    chain = [(a, b) for a, b in pairwise(range(stages))]
    return [(a, b, "forward") for a, b in chain] + [(b, a, "backward") for a, b in chain]


def test_by_hand() -> None:
    """Two ranks, one microbatch: nobody computes beside another; two replicas share one core."""
    seconds = [1.0, 2.0], [3.0, 4.0], [0.0, 0.0]
    assert shared_makespan(("1f1b", 2, 1, 1), seconds, edges_of(2), 1, 1.0) == 10.0
    assert shared_makespan(("1f1b", 2, 1, 1), seconds, edges_of(2), 2, 1.0) == 20.0
    # Two microbatches on two ranks and one core: F0.0, then F0.1 beside F1.0, B1.0, ...
    even = [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]
    assert shared_makespan(("1f1b", 2, 1, 2), even, edges_of(2), 1, 1.0) == pytest.approx(8.0)
    # with a core and a half: two pairs run beside each other at 3/4, four actions alone
    assert shared_makespan(("1f1b", 2, 1, 2), even, edges_of(2), 1, 1.5) == pytest.approx(
        4 + 2 / 0.75
    )


def test_a_step_in_which_someone_waits_for_ever_is_refused() -> None:
    seconds = [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]
    wrong = [(1, 0, "forward"), (0, 1, "forward")]
    with pytest.raises(ValueError, match="deadlock: ranks wait for ever"):
        shared_makespan(("1f1b", 2, 1, 1), seconds, wrong, 1, 1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(("1f1b", "gpipe", "zero_bubble", "interleaved")),
    st.integers(2, 4),
    st.integers(1, 5),
    st.lists(st.floats(0.01, 10), min_size=24, max_size=24),
    st.integers(1, 3),
    st.floats(0.5, 6),
)
def test_between_all_work_on_all_cores_and_one_core_for_each(
    name: str, ranks: int, microbatches: int, drawn: list[float], alike: int, cores: float
) -> None:
    per_rank = 2 if name == "interleaved" else 1
    microbatches = microbatches * ranks if name == "interleaved" else microbatches
    stages = ranks * per_rank
    seconds = drawn[:stages], drawn[8 : 8 + stages], drawn[16 : 16 + stages]
    shape, edges = (name, ranks, per_rank, microbatches), edges_of(stages)
    alone = play(shape, seconds, dict.fromkeys(edges, 0.0), [0.0] * stages)
    found = shared_makespan(shape, seconds, edges, alike, cores)
    work = alike * sum(alone.busy)
    assert found >= max(alone.makespan, work / cores) * (1 - 1e-6)
    # a core is idle only while all that can compute do so: Graham, Bounds on Multiprocessing, 1969
    assert found <= (alone.makespan * max(1.0, 1 / cores) + work / cores) * (1 + 1e-6)
    enough = shared_makespan(shape, seconds, edges, alike, ranks * alike)
    assert enough == pytest.approx(alone.makespan, rel=1e-6)
    one = shared_makespan(shape, seconds, edges, 1, 1.0)
    assert one == pytest.approx(sum(alone.busy), rel=1e-6)
