"""Gradients that ZeRO 2 keeps in shards are outputs of a kind of their own; the graph stays."""

from __future__ import annotations

import pytest

from graphaccel.ir.program import Owned, Sharded, StageProgram
from graphaccel.passes.gradients.shard_gradients import shard_gradients
from tests.passes.support import (
    LINEAR,
    assert_same_results,
    held_by_linear,
    program_of,
    text_of,
)

BEFORE = LINEAR
AFTER = LINEAR.replace("-> (gradient w)", "-> (shard w)")


def applied(level: int = 2) -> StageProgram:
    return shard_gradients(program_of(BEFORE), {"w": Owned(level, Sharded("data", 0))})


@pytest.mark.parametrize("level", [2, 3])
def test_text(level: int) -> None:
    assert text_of(applied(level)) == AFTER


def test_zero_1_keeps_gradients_whole() -> None:
    assert text_of(applied(1)) == BEFORE


def test_values() -> None:
    assert_same_results(program_of(BEFORE), applied(), held_by_linear(), ("loss", "saved"))
