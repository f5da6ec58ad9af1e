"""Action tables and the messages added to them: text out, and properties over random shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import (
    Action,
    build,
    format_schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    parse_action,
    parse_schedule,
    stage_ranks,
    with_head,
    zero_bubble,
)
from graphaccel.schedule.validate import fifo_consistent, in_flight, occupancy, validate


@st.composite
def cases(draw):
    """(name, ranks, stages per rank, microbatches, forward edges, backward edges)."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    ranks = draw(st.integers(1, 6))
    per_rank = draw(st.integers(1, 3)) if name == "interleaved" else 1
    microbatches = draw(st.integers(1, 16))
    stages = ranks * per_rank
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    skips = draw(st.sets(st.sampled_from(pairs), max_size=6)) if pairs else set()
    forward = frozenset(skips | {(stage, stage + 1) for stage in range(stages - 1)})
    backward = frozenset((b, a) for a, b in forward)
    return name, ranks, per_rank, microbatches, forward, backward


@given(cases())
def test_every_schedule_is_valid_with_any_edges(case):
    name, ranks, per_rank, microbatches, forward, backward = case
    schedule = with_communication(build(name, ranks, per_rank, microbatches), forward, backward)
    placed = {stage: stage % ranks for stage in range(ranks * per_rank)}
    validate(schedule, placed, forward, backward)
    assert stage_ranks(schedule) == placed
    assert fifo_consistent(schedule)
    assert parse_schedule(format_schedule(schedule)) == schedule


@given(cases())
def test_in_flight_microbatches_stay_in_bounds(case):
    name, ranks, per_rank, microbatches, _, _ = case
    held = in_flight(build(name, ranks, per_rank, microbatches))
    if name == "gpipe":
        assert held == dict.fromkeys(range(ranks), microbatches)
    elif name == "zero_bubble":
        assert held == dict.fromkeys(range(ranks), min(ranks, microbatches))
    elif per_rank == 1:
        assert held == {stage: min(ranks - stage, microbatches) for stage in range(ranks)}


@given(cases())
def test_microbatches_a_rank_holds_at_once_stay_in_bounds(case):
    """Megatron's interleaving: its warm-up forwards and the one that follows them."""
    _, ranks, per_rank, microbatches, _, _ = case
    for rank, moments in enumerate(occupancy(interleaved(ranks, per_rank, microbatches))):
        most = max(sum(moment.held.values()) for moment in moments)
        if per_rank == 1:
            assert most == min(ranks - rank, microbatches)
        else:
            assert most <= 2 * (ranks - 1 - rank) + (per_rank - 1) * ranks + 1


def test_occupancy_lists_each_combination_once():
    first, last = occupancy(one_f_one_b(2, 50))
    assert [(moment.kind, moment.stage, moment.held) for moment in first] == [
        ("forward", 0, {0: 0}),
        ("forward", 0, {0: 1}),
        ("backward", 0, {0: 2}),
        ("backward", 0, {0: 1}),
    ]
    assert [(moment.kind, moment.held) for moment in last] == [
        ("forward", {1: 0}),
        ("backward", {1: 1}),
    ]


@given(cases())
def test_gradients_are_summed_in_the_same_order_by_every_schedule(case):
    name, ranks, per_rank, microbatches, _, _ = case
    for actions in build(name, ranks, per_rank, microbatches):
        for stage in {action.stage for action in actions}:
            for kind in {action.kind for action in actions}:
                order = [a.microbatch for a in actions if (a.stage, a.kind) == (stage, kind)]
                assert order == list(range(microbatches))


def test_gpipe_text():
    assert format_schedule(gpipe(2, 2)) == "F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.0 B1.1"


def test_one_f_one_b_text():
    assert format_schedule(one_f_one_b(3, 3)) == (
        "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2\n"
        "F1.0 F1.1 B1.0 F1.2 B1.1 B1.2\n"
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2"
    )


def test_zero_bubble_text():
    assert format_schedule(zero_bubble(3, 3)) == (
        "F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2\n"
        "F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 B1.2 W1.1 W1.2\n"
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 W2.1 W2.2"
    )


def test_interleaved_text_of_whole_groups():
    assert format_schedule(interleaved(2, 2, 4)) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3\n"
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


def test_interleaved_leaves_out_what_a_ragged_group_lacks():
    whole, ragged = interleaved(2, 2, 4), interleaved(2, 2, 3)
    kept = tuple(tuple(a for a in actions if a.microbatch < 3) for actions in whole)
    assert ragged == kept
    assert interleaved(3, 1, 5) == one_f_one_b(3, 5)


def test_messages_stand_next_to_producer_and_consumer():
    schedule = with_communication(
        one_f_one_b(3, 2), frozenset({(0, 1), (1, 2), (0, 2)}), frozenset({(1, 0), (2, 1), (2, 0)})
    )
    assert format_schedule(schedule) == (
        "F0.0 SF0>1.0 SF0>2.0 F0.1 SF0>1.1 SF0>2.1"
        " RB1>0.0 RB2>0.0 B0.0 RB1>0.1 RB2>0.1 B0.1 G0\n"
        "RF0>1.0 F1.0 SF1>2.0 RF0>1.1 F1.1 SF1>2.1"
        " RB2>1.0 B1.0 SB1>0.0 RB2>1.1 B1.1 SB1>0.1 G1\n"
        "RF0>2.0 RF1>2.0 F2.0 B2.0 SB2>0.0 SB2>1.0"
        " RF0>2.1 RF1>2.1 F2.1 B2.1 SB2>0.1 SB2>1.1 G2"
    )


def test_receive_of_a_skip_is_pulled_forward_to_keep_the_order_of_sends():
    """Rank 0 sends 0>3.0 before 0>1.1, so rank 1 takes it before it needs it."""
    schedule = with_communication(
        interleaved(2, 2, 2), frozenset({(0, 1), (1, 2), (2, 3), (0, 3)}), frozenset()
    )
    assert (
        format_schedule(schedule)
        .splitlines()[1]
        .startswith("RF0>1.0 F1.0 SF1>2.0 RF0>3.0 RF0>1.1 F1.1 SF1>2.1 RF0>3.1 RF2>3.0 F3.0")
    )


def test_edges_inside_a_rank_send_nothing_and_reductions_close_the_lists():
    schedule = with_communication(interleaved(2, 2, 2), frozenset({(0, 2)}), frozenset({(2, 0)}))
    assert not [a for actions in schedule for a in actions if a.kind in ("send", "receive")]
    assert [str(a) for actions in schedule for a in actions[-2:]] == ["G2", "G0", "G3", "G1"]


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ({(0, 5)}, set(), "forward edge 0 -> 5 names a stage that no rank computes"),
        ({(1, 0)}, set(), "forward edge 1 -> 0 does not go to a later stage"),
        (set(), {(0, 1)}, "backward edge 0 -> 1 does not go to an earlier stage"),
    ],
)
def test_wrong_edges_are_refused(forward, backward, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        with_communication(gpipe(2, 1), frozenset(forward), frozenset(backward))


def test_a_table_with_messages_takes_no_more():
    schedule = with_communication(gpipe(2, 1), frozenset({(0, 1)}), frozenset())
    with pytest.raises(ValueError, match=r"already holds SF0>1\.0"):
        with_communication(schedule, frozenset({(0, 1)}), frozenset())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("zigzag", 2, 1, 4),
            "unknown schedule 'zigzag'; known: gpipe, 1f1b, interleaved, zero_bubble",
        ),
        (("1f1b", 2, 2, 4), "1f1b holds one stage per rank, not 2; use 'interleaved'"),
        (("gpipe", 0, 1, 4), "a schedule needs at least one of its ranks, not 0"),
        (("interleaved", 2, 0, 4), "a schedule needs at least one of its stages per rank, not 0"),
        (("1f1b", 2, 1, 0), "a schedule needs at least one of its microbatches, not 0"),
    ],
)
def test_impossible_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        build(*arguments)


@pytest.mark.parametrize("text", ["F0", "X0.1", "SF0.1", "G0.1", "RB1>0", "F-1.0", ""])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action"):
        parse_action(text)


def test_message_ends_are_stages():
    assert parse_action("RB1>0.2") == Action("receive", 0, 2, peer=1, direction="backward")
    assert parse_action("SF0>3.1").message == parse_action("RF0>3.1").message == (0, 3)
    with pytest.raises(ValueError, match=r"F0\.0 is no message"):
        _ = Action("forward", 0, 0).message


def test_a_stage_belongs_to_one_rank():
    with pytest.raises(ValueError, match="stage 0 is on ranks 0 and 1"):
        stage_ranks(parse_schedule("F0.0\nB0.0"))


def test_a_head_stands_between_forwards_and_backwards() -> None:
    table = with_head(gpipe(2, 2), 1)
    text = format_schedule(with_communication(table, frozenset({(0, 1)}), frozenset({(1, 0)})))
    assert text == (
        "F0.0 SF0>1.0 F0.1 SF0>1.1 RB1>0.0 B0.0 RB1>0.1 B0.1 G0\n"
        "RF0>1.0 F1.0 RF0>1.1 F1.1 H1 B1.0 SB1>0.0 B1.1 SB1>0.1 G1"
    )
    assert parse_schedule(text)[1][4] == Action("head", 1, -1)
    validate(parse_schedule(text), {0: 0, 1: 1}, frozenset({(0, 1)}), frozenset({(1, 0)}))
    with pytest.raises(ValueError, match="stage 1 has a backward before its last forward"):
        with_head(one_f_one_b(2, 2), 1)
    early = "F0.0 H0 F0.1 B0.0 B0.1 G0"
    with pytest.raises(ValueError, match=r"H0 comes before F0.1"):
        validate(parse_schedule(early), {0: 0})
