"""Simulated times against closed forms and against a longest path; the terminal picture."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.planner.estimate import simulate as simulate_module
from graphaccel.planner.estimate.simulate import simulate
from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import build, interleaved, parse_schedule
from graphaccel.schedule.text import gantt


def chain(stages):
    forward = frozenset((stage, stage + 1) for stage in range(stages - 1))
    return forward, frozenset((b, a) for a, b in forward)


def play(
    name, ranks, per_rank, microbatches, forward=1.0, backward=2.0, edge=0.0, reduce=0.0, weight=0.0
):
    """Simulate an even chain of stages; (schedule, timeline)."""
    stages = ranks * per_rank
    edges = chain(stages)
    schedule = with_communication(build(name, ranks, per_rank, microbatches), *edges)
    seconds = {(*e, "forward"): edge for e in edges[0]} | {(*e, "backward"): edge for e in edges[1]}
    return schedule, simulate(
        schedule,
        [forward] * stages,
        [backward] * stages,
        seconds,
        [reduce] * stages,
        [weight] * stages,
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 24))
def test_bubble_of_gpipe_and_1f1b(name, ranks, microbatches):
    _, timeline = play(name, ranks, 1, microbatches)
    assert timeline.makespan == 3 * (microbatches + ranks - 1)
    assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(ranks=st.integers(1, 5), per_rank=st.integers(2, 3), groups=st.integers(1, 4))
def test_bubble_of_interleaved_is_smaller_by_the_stages_per_rank(ranks, per_rank, groups):
    _, timeline = play("interleaved", ranks, per_rank, groups * ranks)
    chunks = per_rank * groups * ranks
    assert timeline.makespan == 3 * (chunks + ranks - 1)
    assert timeline.bubble_fraction == pytest.approx((ranks - 1) / (chunks + ranks - 1))


@given(ranks=st.integers(1, 8), extra=st.integers(0, 16), late=st.integers(1, 4))
def test_weights_fill_the_bubble(ranks, extra, late):
    """(p - 1)(F + B - W) is left of (p - 1)(F + B + W), the paper's table 2."""
    microbatches, weight = ranks + extra, late / 4
    _, timeline = play("zero_bubble", ranks, 1, microbatches, backward=1.0, weight=weight)
    idle = (ranks - 1) * (2 - weight)
    assert timeline.makespan == pytest.approx(microbatches * (2 + weight) + idle)
    assert timeline.idle == pytest.approx((idle,) * ranks)


def test_one_microbatch_passes_every_edge_twice():
    _, timeline = play("1f1b", 4, 1, 1, edge=0.5, reduce=0.25)
    assert timeline.makespan == 4 * 3 + 2 * 3 * 0.5 + 0.25
    assert timeline.busy == (3, 3, 3, 3)
    assert timeline.reducing == (0.25,) * 4
    assert timeline.idle == (12, 12, 12, 12)


def test_sends_overlap_compute_and_share_their_channel():
    """The second message waits for the wire, the sender's second forward for nothing."""
    schedule = parse_schedule("F0.0 SF0>1.0 F0.1 SF0>1.1\nRF0>1.0 F1.0 RF0>1.1 F1.1")
    timeline = simulate(schedule, [1, 1], [0, 0], {(0, 1, "forward"): 3}, [0, 0])
    assert timeline.spans == (
        ((0, 1), (1, 4), (1, 2), (4, 7)),
        ((0, 4), (4, 5), (5, 7), (7, 8)),
    )
    assert timeline.makespan == 8


@given(
    ranks=st.integers(1, 4),
    per_rank=st.integers(2, 3),
    microbatches=st.integers(1, 7),
    data=st.data(),
)
def test_receives_pulled_forward_add_no_waiting(ranks, per_rank, microbatches, data):
    """With free messages each action starts when its rank and its inputs are ready, no later."""
    stages = ranks * per_rank
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    forward = frozenset(data.draw(st.sets(st.sampled_from(pairs), max_size=8)))
    backward = frozenset((b, a) for a, b in forward)
    seconds = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    durations = {"forward": data.draw(seconds), "backward": data.draw(seconds)}
    table = interleaved(ranks, per_rank, microbatches)
    free = {(*e, "forward"): 0 for e in forward} | {(*e, "backward"): 0 for e in backward}
    timeline = simulate(
        with_communication(table, forward, backward), *durations.values(), free, [0] * stages
    )

    edges = {"forward": forward, "backward": backward}
    before = {b: a for actions in table for a, b in pairwise(actions)}
    ends = {}

    def end(action):
        if action not in ends:
            inputs = [
                type(action)(action.kind, source, action.microbatch)
                for source, destination in edges[action.kind]
                if destination == action.stage
            ]
            inputs += [before[action]] if action in before else []
            ends[action] = durations[action.kind][action.stage] + max(map(end, inputs), default=0)
        return ends[action]

    assert timeline.makespan == max(end(action) for actions in table for action in actions)


@st.composite
def tables(draw):
    """(name, ranks, stages of a rank, microbatches)."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    per_rank = draw(st.integers(1, 3)) if name == "interleaved" else 1
    return name, draw(st.integers(1, 5)), per_rank, draw(st.integers(1, 12))


@given(tables(), st.data())
def test_playing_without_a_table_says_what_the_table_says(shape, data):
    """To the last bit, with messages that skip stages too."""
    stages = shape[1] * shape[2]
    seconds = st.lists(st.floats(0.01, 3.0), min_size=stages, max_size=stages)
    forward, backward, weight, reduce = (data.draw(seconds) for _ in range(4))
    ahead = {e for e in chain(stages)[0] if data.draw(st.booleans())}
    ahead |= {(0, stages - 1)} if stages > 1 and data.draw(st.booleans()) else set()
    back = {(b, a) for a, b in ahead if data.draw(st.booleans())}
    edges = {(*e, "forward"): data.draw(st.floats(0.0, 2.0)) for e in sorted(ahead)}
    edges |= {(*e, "backward"): data.draw(st.floats(0.0, 2.0)) for e in sorted(back)}
    schedule = with_communication(build(*shape), frozenset(ahead), frozenset(back))
    slow = simulate(schedule, forward, backward, edges, reduce, weight)
    fast = simulate_module.play(shape, (forward, backward, weight), edges, reduce)
    assert (fast.makespan, fast.busy) == (slow.makespan, slow.busy)


def test_a_deep_and_long_schedule():
    _, timeline = play("1f1b", 16, 1, 512)
    assert timeline.makespan == 3 * (512 + 15)


def test_a_missing_duration_is_an_error():
    schedule = parse_schedule("F0.0 SF0>1.0\nRF0>1.0 F1.0")
    with pytest.raises(KeyError):
        simulate(schedule, [1, 1], [1, 1], {}, [0, 0])


def test_picture_of_1f1b():
    schedule, timeline = play("1f1b", 4, 1, 8)
    assert gantt(schedule, timeline.spans, width=33) == (
        "stage 0 |0123......aa4bb5cc6dd7ee.ff.gg.hh|\n"
        "stage 1 |.012....aa3bb4cc5dd6ee7ff.gg.hh..|\n"
        "stage 2 |..01..aa2bb3cc4dd5ee6ff7gg.hh....|\n"
        "stage 3 |...0aa1bb2cc3dd4ee5ff6gg7hh......|"
    )


def test_picture_of_interleaved_with_reductions():
    schedule, timeline = play("interleaved", 2, 2, 2, reduce=1.0)
    assert gantt(schedule, timeline.spans, width=17) == (
        "stages 0,2 |0101..aa.bbaabb++|\nstages 1,3 |.010aa1bbaabb++..|"
    )


def test_picture_starts_labels_again_and_needs_matching_spans():
    schedule, timeline = play("gpipe", 1, 1, 28, backward=1.0)
    assert gantt(schedule, timeline.spans, width=56) == (
        "stage 0 |0123456789012345678901234567abcdefghijklmnopqrstuvwxyzab|"
    )
    with pytest.raises(ValueError, match="spans must hold"):
        gantt(schedule, [[]], width=10)
    with pytest.raises(ValueError, match="at least one column"):
        gantt(schedule, timeline.spans, width=0)
