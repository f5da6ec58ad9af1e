"""How much is asked of a rank's blocks, where what they save is not what was estimated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.planner.search.minimal_recompute import Rank
from graphaccel.planner.search.recompute import BlockOption, Knapsack

_ROUNDS = 8
_EACH = 100  # bytes that a block saves of a microbatch, in its last way
WAYS = ((40, 1.0, ("a", "b")), (80, 2.5, ("a",)), (_EACH, 4.0, ()))


def _rank(blocks: int, waiting: int, least: int = 0) -> Rank:
    options = [
        tuple(BlockOption(number, f"blocks.{number}", *way) for way in WAYS)
        for number in range(blocks)
    ]
    return Rank(options, [waiting] * blocks, least)


def _saved(choice: dict[str, tuple[str, ...]]) -> int:
    sizes = {names: size for size, _, names in WAYS}
    return sum(sizes[names] for names in choice.values())


def _asked(rank: Rank, missing: int, share: float, spare: float) -> dict[str, tuple[str, ...]]:
    """What is found where a choice saves `share` bytes for each that a block has."""
    for _ in range(_ROUNDS):
        if not rank.asks(missing - share * _saved(rank.chosen), spare):
            break
    return rank.best


@given(
    blocks=st.integers(1, 40), waiting=st.integers(1, 64), share=st.floats(0.05, 70.0),
    part=st.floats(0.0, 1.0),
)  # fmt: skip
def test_what_fits_with_all_computed_again_is_found(
    blocks: int, waiting: int, share: float, part: float
) -> None:
    most = share * _EACH * blocks
    found = _asked(_rank(blocks, waiting), int(part * most), share, most / 32)
    assert int(part * most) <= share * _saved(found) + 1e-6


@given(
    blocks=st.integers(8, 40), over=st.sampled_from((1, 2, 4, 16)), part=st.floats(0.05, 0.95)
)  # fmt: skip
def test_no_more_than_a_few_blocks_too_many(blocks: int, over: int, part: float) -> None:
    """over: how many times as much is estimated as is saved."""
    waiting = 16
    share = waiting / over
    most = share * _EACH * blocks
    missing = int(part * most)
    found = _asked(_rank(blocks, waiting), missing, share, most / 16)
    assert missing <= share * _saved(found)
    assert share * _saved(found) - missing <= max(most / 4, 2 * share * _EACH)


def test_a_byte_that_is_missing_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for grows the faster the longer the same is chosen."""
    asked: list[float] = []
    cheapest = Knapsack.cheapest

    def counted(items: Knapsack, needs: float) -> list[int] | None:
        asked.append(needs)
        return cheapest(items, needs)

    rank = _rank(32, 1_000_000)
    assert rank.asks(30e6, 1e9)
    before = rank.chosen
    monkeypatch.setattr(Knapsack, "cheapest", counted)
    assert rank.asks(1, 1e9)
    assert _saved(rank.chosen) > _saved(before)
    assert len(asked) < 40


def test_nothing_is_computed_again_where_nothing_is_missing() -> None:
    assert _asked(_rank(4, 2), 0, 1.0, 0.0) == {}


def test_a_rank_without_blocks_asks_for_nothing_more() -> None:
    rank = Rank([], [], 0)
    assert not rank.asks(100, 1.0)
    assert rank.best == {}
