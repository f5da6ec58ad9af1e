"""Searches for tests that need only a part of their answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from graphaccel.errors import InfeasiblePlan
from graphaccel.planner.explain import what_if
from graphaccel.planner.search import search as searching


@contextmanager
def without_relaxations() -> Iterator[None]:
    """Meanwhile InfeasiblePlan does not name what would help: each of the changes that are
    tried is a search of its own."""
    with patch.object(searching, "infeasible", _infeasible):
        yield


@contextmanager
def decisions_alone() -> Iterator[None]:
    """Meanwhile an explanation has its decisions, but no prices and no stability: each of these
    is a search of its own."""
    with (
        patch.object(what_if, "prices", lambda *_: iter(())),
        patch.object(what_if, "shifts", lambda *_: iter(())),
    ):
        yield


def _infeasible(*_: Any) -> InfeasiblePlan:
    return InfeasiblePlan(
        devices=1, memory=1, peak=2, stage=0, closest="", breakdown={"param": 2}, relaxations=()
    )
