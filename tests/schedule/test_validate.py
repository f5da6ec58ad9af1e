"""Each fault a table can have is found and named."""

import re

import pytest

from graphaccel.schedule.table import parse_schedule
from graphaccel.schedule.validate import execution_order, fifo_consistent, validate

FORWARD, BACKWARD = frozenset({(0, 1)}), frozenset({(1, 0)})
GOOD = """
F0.0 SF0>1.0 RB1>0.0 B0.0 G0
RF0>1.0 F1.0 B1.0 SB1>0.0 G1
"""


def check(text):
    validate(parse_schedule(text), {0: 0, 1: 1}, FORWARD, BACKWARD)


def test_a_good_table_passes():
    check(GOOD)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("F1.0 B1.0", "F1.0", "B1.0 is missing"),
        ("F1.0 B1.0", "B1.0 F1.0", "B1.0 comes before F1.0"),
        ("F1.0 B1.0", "F1.0 F1.0 B1.0", "F1.0 occurs twice, on ranks 1 and 1"),
        ("F1.0 B1.0", "F1.0 B1.0 F2.0", "F2.0 belongs to no known stage"),
        ("F0.0 SF0>1.0", "SF0>1.0 F0.0", "SF0>1.0 comes before F0.0"),
        ("RF0>1.0 F1.0", "F1.0 RF0>1.0", "F1.0 comes before RF0>1.0"),
        ("SF0>1.0 ", "", "SF0>1.0 is missing"),
        ("RB1>0.0 ", "", "RB1>0.0 is missing"),
        ("G1", "G1 SB1>0.3", "SB1>0.3 belongs to no edge"),
        (" G1", "", "G1 is missing"),
        ("SB1>0.0 G1", "SB1>0.0 G1 G3", "G3 is on rank 1, which is not its own"),
        ("B0.0 G0", "G0 B0.0", "G0 comes before B0.0"),
    ],
)
def test_a_fault_is_named(before, after, message):
    assert before in GOOD
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check(GOOD.replace(before, after))


def test_a_stage_on_another_rank_is_found():
    with pytest.raises(ValueError, match=r"F0\.0 is on rank 0, not 1"):
        validate(parse_schedule("F0.0 B0.0 G0\n"), {0: 1})


def test_edges_between_local_stages_need_their_order():
    schedule = parse_schedule("F1.0 F0.0 B1.0 B0.0 G1 G0")
    with pytest.raises(ValueError, match=r"F1\.0 comes before F0\.0"):
        validate(schedule, {0: 0, 1: 0}, FORWARD, frozenset())


def test_a_deadlock_says_who_waits_for_what():
    """Each rank runs its own stage's forward only after the other's message of a later one."""
    text = """
        F0.0 SF0>2.0 RF1>2.0 F2.0 SF2>3.0 B0.0 B2.0 G0 G2
        RF2>3.0 F3.0 F1.0 SF1>2.0 B1.0 B3.0 G1 G3
    """
    schedule = parse_schedule(text.replace("SF0>2.0 ", ""))
    waits = "deadlock: rank 0 waits at RF1>2.0, rank 1 waits at RF2>3.0"
    with pytest.raises(ValueError, match=re.escape(waits)):
        execution_order(schedule)
    edges = frozenset({(0, 2), (1, 2), (2, 3)})
    with pytest.raises(ValueError, match=re.escape(waits)):
        validate(schedule, {0: 0, 1: 1, 2: 0, 3: 1}, edges)


def test_execution_order_puts_sends_before_receives():
    schedule = parse_schedule(GOOD)
    order = [str(schedule[rank][index]) for rank, index in execution_order(schedule)]
    assert sorted(order) == sorted(GOOD.split())
    assert order.index("SF0>1.0") < order.index("RF0>1.0")
    assert order.index("SB1>0.0") < order.index("RB1>0.0")


def test_messages_out_of_order_are_found():
    text = """
        F0.0 SF0>1.0 F0.1 SF0>1.1 B0.0 B0.1 G0
        RF0>1.1 RF0>1.0 F1.0 F1.1 B1.0 B1.1 G1
    """
    schedule = parse_schedule(text)
    assert not fifo_consistent(schedule)
    with pytest.raises(ValueError, match="another order than they are sent"):
        validate(schedule, {0: 0, 1: 1}, FORWARD)
