"""Results are computed once for each function and request, and stay with their owner."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.analysis_cache import AnalysisCache


def append(calls: list[int], number: int) -> int:
    calls.append(number)
    return number


def double(calls: list[int], number: int) -> int:
    calls.append(number)
    return 2 * number


def test_a_function_runs_once_for_a_request() -> None:
    analyses, calls = AnalysisCache(), list[int]()
    assert analyses.cached("a", append, calls, 1) == 1
    assert analyses.cached("a", append, calls, number=2) == 1
    assert analyses.cached("b", append, calls, 3) == 3
    assert analyses.cached("a", double, calls, 4) == 8
    assert calls == [1, 3, 4]


def test_what_would_never_be_found_is_refused() -> None:
    def nested() -> int:
        return 1

    for compute in (nested, lambda: 1):
        with pytest.raises(ValueError, match="is another function in each call"):
            AnalysisCache().cached((), compute)


def test_copies_begin_with_nothing() -> None:
    analyses, calls = AnalysisCache(), list[int]()
    analyses.cached((), append, calls, 1)
    for other in (copy.deepcopy(analyses), pickle.loads(pickle.dumps(analyses))):
        assert other.cached((), append, calls, 2) == 2


def test_a_changed_step_graph_has_a_cache_of_its_own(
    captured: Callable[[str], StepGraph],
) -> None:
    step, calls = captured("gpt"), list[int]()
    changed = replace(step, sizes={})
    assert changed.analyses is not step.analyses
    step.analyses.cached("here", append, calls, 1)
    assert changed.analyses.cached("here", append, calls, 2) == 2
