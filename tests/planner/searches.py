"""Searches for tests that ask only whether a plan fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from graphaccel.errors import InfeasiblePlan
from graphaccel.planner.search import search as searching


@contextmanager
def without_relaxations() -> Iterator[None]:
    """Meanwhile InfeasiblePlan does not name what would help: each of the changes that are
    tried is a search of its own."""
    with patch.object(searching, "infeasible", _infeasible):
        yield


def _infeasible(*_: Any) -> InfeasiblePlan:
    return InfeasiblePlan(
        devices=1, memory=1, peak=2, stage=0, closest="", breakdown={"param": 2}, relaxations=()
    )
