"""When each action of a schedule happens, and how long a step takes.

Each rank runs its list in order. A send starts when the action before it is done and overlaps what
follows; messages of one channel (source rank, destination rank, direction) follow one another. A
receive ends when its message has arrived. Times depend on the lists' order only, so one pass over
any order that respects the messages (``execution_order``) gives them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphaccel.schedule.table import Schedule, stage_ranks
from graphaccel.schedule.validate import execution_order


@dataclass(frozen=True)
class Timeline:
    """A simulated step; all times in seconds from its start.

    ``spans[rank][index]`` is the (start, end) of that rank's action; for a send it is the time on
    the wire, for a receive the time the rank waits. ``busy`` is computing time per rank,
    ``reducing`` its gradient reductions, ``idle`` the rest up to the makespan: bubble and exposed
    messages together. The share of the messages is ``makespan`` minus that of a simulation with
    all edges at zero seconds.
    """

    makespan: float
    spans: tuple[tuple[tuple[float, float], ...], ...]
    busy: tuple[float, ...]
    reducing: tuple[float, ...]
    idle: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time, 0..1; (p - 1) / (m + p - 1) for even 1F1B."""
        available = self.makespan * len(self.spans)
        return sum(self.idle) / available if available else 0.0


def simulate(
    schedule: Schedule,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    edge_seconds: Mapping[tuple[int, int, str], float],
    reduce_seconds: Sequence[float],
    weight_seconds: Sequence[float] = (),
) -> Timeline:
    """Play ``schedule``, a table with its messages, against given durations.

    The sequences hold seconds per stage (per microbatch for forward, backward and weight, per step
    for reduce: what is not hidden behind the backward). Where a table has weights apart,
    ``backward_seconds`` are without them. ``edge_seconds`` holds seconds per message,
    by (source stage, destination stage, "forward" or "backward").

    Raises ``ValueError`` when the table deadlocks, and ``KeyError`` or ``IndexError`` when a
    duration is missing.
    """
    ranks = stage_ranks(schedule)
    per_stage = {
        "forward": forward_seconds,
        "backward": backward_seconds,
        "weight": weight_seconds,
        "reduce": reduce_seconds,
    }
    clock = [0.0] * len(schedule)
    busy = [0.0] * len(schedule)
    reducing = [0.0] * len(schedule)
    channel_free: dict[tuple[int, int, str], float] = {}
    arrival: dict[tuple[int, int, int, str], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule]
    for rank, index in execution_order(schedule):
        action = schedule[rank][index]
        kind = action.kind
        start = clock[rank]
        if kind == "send":
            channel = (rank, ranks[action.peer], action.direction)
            start = max(start, channel_free.get(channel, 0.0))
            end = start + edge_seconds[action.stage, action.peer, action.direction]
            channel_free[channel] = end
            arrival[action.stage, action.peer, action.microbatch, action.direction] = end
        elif kind == "receive":
            message = (action.peer, action.stage, action.microbatch, action.direction)
            end = clock[rank] = max(start, arrival[message])
        else:
            seconds = per_stage[kind][action.stage]
            end = clock[rank] = start + seconds
            (reducing if kind == "reduce" else busy)[rank] += seconds
        spans[rank].append((start, end))
    makespan = max(clock, default=0.0)
    idle = (makespan - b - r for b, r in zip(busy, reducing, strict=True))
    return Timeline(makespan, tuple(map(tuple, spans)), tuple(busy), tuple(reducing), tuple(idle))
