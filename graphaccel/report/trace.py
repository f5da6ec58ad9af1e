"""Writes the predicted step in the Chrome trace format, for ui.perfetto.dev or chrome://tracing.

Google, "Trace Event Format" (2016). One process for each pipeline rank, of one replica; in it a
track for what the rank computes and waits for, one for each channel it sends on, and a counter of
the bytes it holds. On a track events never overlap. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.facts import Event, Facts
from graphaccel.schedule.table import COMPUTING

_COLOURS = {  # names that both viewers have
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "weight": "thread_state_unknown",
    "receive": "thread_state_sleeping",
    "reduce": "thread_state_iowait",
    "optimizer": "startup",
}
_COMPUTE = 0


def trace_json(facts: Facts) -> str:
    """The whole trace as JSON with sorted keys."""
    events = [*_tracks(facts), *_slices(facts), *_flows(facts), *_counters(facts)]
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(facts)}
    return json.dumps(content, sort_keys=True) + "\n"


def _about(facts: Facts) -> dict[str, str]:
    cluster = facts.cluster
    return {
        "plan": plan_name(facts.plan),
        "model": facts.model.name,
        "cluster": f"{cluster.count} x {cluster.device.name}",
        "times": "predicted",
    }


def _channels(facts: Facts) -> dict[tuple[int, int, str], int]:
    """(rank, destination rank, direction) → track of the sender, from 1 on each rank."""
    results: dict[tuple[int, int, str], int] = {}
    homes = {s.stage: s.rank for s in facts.stages}
    for event in facts.events:
        if event.kind == "send":
            key = (event.rank, homes[event.peer], event.direction)
            number = 1 + sum(rank == event.rank for rank, _, _ in results)
            results.setdefault(key, number)
    return results


def _track(facts: Facts, event: Event, channels: dict[tuple[int, int, str], int]) -> int:
    if event.kind != "send":
        return _COMPUTE
    homes = {s.stage: s.rank for s in facts.stages}
    return channels[event.rank, homes[event.peer], event.direction]


def _tracks(facts: Facts) -> Iterator[dict[str, Any]]:
    copies = facts.plan.devices // max(1, len({s.rank for s in facts.stages}))
    for rank in sorted({e.rank for e in facts.events}):
        stages = ", ".join(str(s.stage) for s in facts.stages if s.rank == rank)
        name = f"rank {rank}: stage {stages}" + (f" (one of {copies} alike)" if copies > 1 else "")
        yield _meta(rank, 0, "process_name", {"name": name})
        yield _meta(rank, 0, "process_sort_index", {"sort_index": rank})
        yield _meta(rank, _COMPUTE, "thread_name", {"name": "compute"})
    for (rank, other, direction), track in _channels(facts).items():
        what = "activations" if direction == "forward" else "gradients"
        yield _meta(rank, track, "thread_name", {"name": f"{what} to rank {other}"})


def _meta(rank: int, track: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": args}


def _slices(facts: Facts) -> Iterator[dict[str, Any]]:
    channels = _channels(facts)
    for event in facts.events:
        if event.end <= event.start:
            continue
        slice_: dict[str, Any] = {
            "ph": "X",
            "pid": event.rank,
            "tid": _track(facts, event, channels),
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "cat": event.kind,
            "name": event_name(event),
            "args": {"stage": event.stage, "microbatch": event.microbatch},
        }
        if event.kind in _COLOURS:
            slice_["cname"] = _COLOURS[event.kind]
        yield slice_


def event_name(event: Event) -> str:
    """A short description of an event."""
    if event.kind in COMPUTING:
        return f"{event.kind} {event.microbatch}"
    if event.kind == "send":
        return f"send {event.direction} {event.microbatch} to stage {event.peer}"
    if event.kind == "receive":
        return f"wait for {event.direction} {event.microbatch} of stage {event.peer}"
    return "reduce gradients" if event.kind == "reduce" else event.kind


def _flows(facts: Facts) -> Iterator[dict[str, Any]]:
    """An arrow from each send to the forward or backward that uses the sent values."""
    channels = _channels(facts)
    users = {(e.kind, e.stage, e.microbatch): e for e in facts.events}
    for number, event in enumerate(facts.events):
        if event.kind != "send" or event.end <= event.start:
            continue
        user = users.get((event.direction, event.peer, event.microbatch))
        if user is None:
            continue
        common = {"cat": "message", "name": event.direction, "id": number}
        track = _track(facts, event, channels)
        yield {**common, "ph": "s", "pid": event.rank, "tid": track, "ts": event.start * 1e6}
        end = {"pid": user.rank, "tid": _COMPUTE, "ts": user.start * 1e6}
        yield {**common, **end, "ph": "f", "bp": "e"}


def _counters(facts: Facts) -> Iterator[dict[str, Any]]:
    for row in facts.memory:
        for sample in row.samples:
            yield {
                "ph": "C",
                "pid": row.rank,
                "name": "memory (bytes)",
                "ts": sample.seconds * 1e6,
                "args": dict(sample.live),
            }
