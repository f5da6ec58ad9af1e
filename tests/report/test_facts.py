"""Reports as data: JSON round trip, the trace's tracks, memory in the course of a step."""

from __future__ import annotations

import json
import types
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.facts import Facts, RankMemory
from graphaccel.report.plain import from_plain, to_plain
from graphaccel.report.trace import trace_json


def strategy(kind: Any) -> st.SearchStrategy:
    """Values of a type hint; what `graphaccel.report.plain` understands."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Cluster:
        return st.sampled_from([cluster("h100-80gb", 16), cluster("v100-32gb", 1)])
    if origin in (Union, types.UnionType):
        return st.one_of([strategy(a) for a in arguments])
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(strategy(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=3), strategy(arguments[1]), max_size=2)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = {f.name: strategy(hints[f.name]) for f in fields(kind) if f.name != "schema"}
        return st.builds(kind, **parts)
    simple = {
        float: st.floats(allow_nan=False, allow_infinity=False),
        int: st.integers(),
        bool: st.booleans(),
        str: st.text(max_size=5),
        type(None): st.none(),
    }
    return simple[kind]


@settings(max_examples=30, deadline=None)
@given(strategy(Facts))
def test_reports_are_read_back_as_they_were_written(facts: Facts) -> None:
    assert Facts.from_json(facts.to_json()) == facts


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"schema": 2}, "report schema 2; this version reads 1"),
        ([], "report schema None; this version reads 1"),
        ({"schema": 1, "speed": 3}, "Facts is to be without speed"),
    ],
)
def test_what_is_no_report(data: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Facts.from_json(json.dumps(data))


def test_data_of_another_type_is_refused() -> None:
    whole = to_plain(RankMemory(0, ()))
    for change in ({"rank": "0"}, {"rank": True}, {"rank": None}, {"samples": 1}):
        with pytest.raises(ValueError, match=f"RankMemory.{next(iter(change))} is to be"):
            from_plain(RankMemory, {**whole, **change})
    with pytest.raises(TypeError, match="object is no plain data"):
        to_plain(object())


def test_a_real_report_is_read_back(facts: Facts) -> None:
    assert Facts.from_json(facts.to_json()) == facts


def test_memory_in_the_course_of_a_step_has_the_predicted_peak(facts: Facts) -> None:
    for row, predicted in zip(facts.memory, facts.prediction.memory, strict=True):
        top = max(row.samples, key=lambda s: s.total)
        assert top.total == predicted.peak
        assert dict(top.live) == predicted.parts
        assert top.at == predicted.at
        times = [s.seconds for s in row.samples]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= facts.prediction.seconds
        assert len(times) <= 1500


def test_every_action_is_an_event_and_none_after_the_step(facts: Facts) -> None:
    plan = facts.plan
    done = [(e.kind, e.stage, e.microbatch) for e in facts.events if e.microbatch >= 0]
    for kind in ("forward", "backward"):
        wanted = {(kind, s, m) for s in range(plan.stages) for m in range(plan.microbatches)}
        assert sorted(d for d in done if d[0] == kind) == sorted(wanted)
    assert max(e.end for e in facts.events) == pytest.approx(facts.prediction.seconds)


def test_the_chosen_plan_is_one_of_the_candidates(facts: Facts) -> None:
    (chosen,) = (p for p in facts.candidates if p.chosen)
    assert chosen.name == plan_name(facts.plan)
    assert chosen.seconds == facts.prediction.seconds
    assert chosen.peak == max(m.peak for m in facts.prediction.memory)
    for point in facts.candidates:
        better = [p for p in facts.candidates if p.seconds <= point.seconds and p.peak < point.peak]
        assert point.front == (not better) or any(
            p.seconds == point.seconds and p.peak == point.peak for p in facts.candidates
        )


def test_events_of_a_track_never_overlap(facts: Facts) -> None:
    trace = json.loads(trace_json(facts))["traceEvents"]
    tracks = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]) for e in trace if e["name"] == "thread_name"}
    assert set(tracks) <= named
    for spans in tracks.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start >= end - 1e-6


def test_messages_are_arrows_and_memory_is_a_counter(facts: Facts) -> None:
    trace = json.loads(trace_json(facts))["traceEvents"]
    starts = {e["id"]: e for e in trace if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace if e["ph"] == "f"}
    assert set(starts) == set(ends)
    sent = [e for e in facts.events if e.kind == "send" and e.end > e.start]
    assert len(starts) == len(sent)
    for number, start in starts.items():
        assert start["ts"] < ends[number]["ts"]
        assert start["pid"] != ends[number]["pid"]
    counted = [sum(e["args"].values()) for e in trace if e["ph"] == "C"]
    assert max(counted) == max(m.peak for m in facts.prediction.memory)
