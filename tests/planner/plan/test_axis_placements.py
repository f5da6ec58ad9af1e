"""Placements as a plan states them: their text, by block kind, and between few and all layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.ir.replication.layers import NotRepeated, Run, among
from graphaccel.planner.plan.axis_placements import (
    BlockPlacements,
    all_layers,
    by_name,
    few_layers,
    grouped,
)
from graphaccel.sharding.placement_names import Name
from graphaccel.sharding.placement_text import (
    call_text,
    placement_text,
    read_call,
    read_placement,
)
from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.shard import Row, Shard

counts = st.integers(0, 9)
shards = st.builds(Shard, counts, st.integers(1, 4), counts) | st.builds(
    Shard, counts, by=st.sampled_from(["forward gate: topk [1]", "h.0|forward a, (b): mm 2"]),
    experts=counts,
)  # fmt: skip
tensors = st.sampled_from([REPLICATED, PARTIAL]) | shards
rows = st.builds(
    Row,
    st.lists(tensors | st.none()).map(tuple),
    st.lists(tensors, min_size=1).map(tuple),
    st.sampled_from(["", "softmax", "nll_loss"]),
)


@given(tensors | st.none())
def test_a_placement_is_read_back(place: str | Shard | None) -> None:
    assert read_placement(placement_text(place)) == place


@given(rows, st.dictionaries(counts, tensors))
def test_a_call_is_read_back(row: Row, kept: dict[int, str | Shard]) -> None:
    assert read_call(call_text(row, kept)) == (row, kept)


@pytest.mark.parametrize(
    "text",
    [
        "replicated",
        "shard(0) -> any",
        "shard(0) -> shard(0), ",
        "sharded -> replicated",
        "shard(0) -> shard(0, size=2)",
        "shard(0) -> shard(0); gathered",
        "shard(0)shard(1) -> partial",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the sentence differs
        read_call(text)


RUNS = (Run("h", 0, 12), Run("h", 12, 5), Run("d", 1, 7))


def placements(step: tuple[Run, ...]) -> dict[Name, str]:
    """Of a step whose runs are these: the first, the middle and the last layer of a run differ, and
    two layers of "h" and two of "d" are behind the runs."""
    found = {Name("", "forward", "norm: mm"): "replicated -> replicated"}
    found[Name("d.0", "forward", "mm")] = "shard(9) -> partial"
    for kind, run in enumerate(step):
        for number in range(run.count):
            place = 0 if number == 0 else 2 if number == run.count - 1 else 1
            found[Name(run.layer(number), "forward", "mm")] = (
                f"shard({3 * kind + place}) -> partial"
            )
    for path, run in (("h", step[1]), ("d", step[2])):
        for number in range(2):
            behind = run.first + run.count + number
            found[Name(f"{path}.{behind}", "backward", "mm")] = f"shard({number}) -> partial"
    return found


@pytest.mark.parametrize("counts", [(3, 3, 3), (4, 3, 3), (3, 4, 3), (3, 3, 4)])
def test_few_layers_stand_for_all(counts: tuple[int, ...]) -> None:
    few, full = placements(among(RUNS, counts)), placements(RUNS)
    assert by_name(all_layers(grouped(few), RUNS, counts)) == full
    assert by_name(few_layers(grouped(full), RUNS, counts)) == few


def test_layers_that_one_stands_for_are_placed_alike() -> None:
    full = placements(RUNS) | {Name("h.5", "forward", "mm"): "partial -> partial"}
    with pytest.raises(NotRepeated, match=r"h\.5 is placed differently"):
        few_layers(grouped(full), RUNS, (3, 3, 3))


def test_equal_blocks_are_stated_once() -> None:
    stated = grouped(placements(RUNS))
    assert [own.blocks for own in stated][:4] == [("",), ("d.0",), ("h.0",), ("h.1-10",)]
    assert by_name(stated) == placements(RUNS)
    with pytest.raises(ValueError, match=r"h\.3 forward mm is stated twice"):
        by_name((*stated, BlockPlacements(("h.3",), forward=(("mm", "partial -> partial"),))))
