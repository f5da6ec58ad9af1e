"""Collectives that wait for all ranks: one error of ours where another rank does not take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from graphaccel.errors import RankLost
from graphaccel.runtime.execution.failures import cause_of
from graphaccel.runtime.execution.lost_rank import is_connection


@contextmanager
def answered(waiting_for: str, *, done: str = "what came before", lost: str = "") -> Iterator[None]:
    """Around collectives. Raises RankLost (GA501) where another rank does not take part in one.

    waiting_for, done: what this rank waits for, and did last, in words. lost: which rank, where
    only one can be.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_connection(error):
            raise
        raise unanswered(error, waiting_for, done, lost) from error


def unanswered(error: RuntimeError, waiting_for: str, done: str, lost: str = "") -> RankLost:
    """The error about a rank that did not take part in a collective; arguments as of `answered`."""
    rank = dist.get_rank()
    two = dist.is_initialized() and dist.get_world_size() == 2
    return RankLost(
        rank=rank,
        stage=None,
        lost=lost or (f"rank {1 - rank}" if two else "another rank"),
        last_action=done,
        waiting_for=waiting_for,
        cause=cause_of(error),
    )


def from_all(own: Any, waiting_for: str, group: Any = None) -> list[Any]:
    """What each rank has, by rank. A collective; raises RankLost (GA501)."""
    every: list[Any] = [None] * dist.get_world_size(group)
    with answered(waiting_for):
        dist.all_gather_object(every, own, group=group)
    return every


def from_first(said: Any, waiting_for: str) -> Any:
    """What rank 0 says, on every rank. A collective; raises RankLost (GA501)."""
    sent = [said]
    with answered(waiting_for):
        dist.broadcast_object_list(sent, 0)
    return sent[0]
