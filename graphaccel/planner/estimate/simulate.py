"""Simulates a schedule: when each action happens, and how long a step takes.

Each rank runs its list in order. A send starts when the action before it is done and overlaps what
follows; messages of one channel (source rank, destination rank, direction) follow one another. A
receive ends when its message has arrived. Times depend on the order of the lists only, so one pass
over any order that respects the messages (``execution_order``) gives them exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from graphaccel.schedule.table import Schedule, build, stage_ranks
from graphaccel.schedule.validate import execution_order


@dataclass(frozen=True)
class Timeline:
    """A simulated step; all times in seconds from its start.

    ``spans[rank][index]`` is the (start, end) of that rank's action; for a send it is the time on
    the wire, for a receive the time the rank waits. ``busy`` is compute time per rank, ``reducing``
    its gradient reductions, ``idle`` the rest up to the makespan: bubble and exposed messages
    together. The share of the messages is ``makespan`` minus that of a simulation with all edges at
    zero seconds.
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
    """Simulate ``schedule``, a table with its messages, with given durations.

    The sequences hold seconds per stage (per microbatch for forward, backward and weight, per step
    for reduce: the exposed part after the backward). Where a table has separate weight gradients,
    ``backward_seconds`` are without them. ``edge_seconds`` holds seconds per message, by (source
    stage, destination stage, "forward" or "backward").

    Raises ``ValueError`` when the table deadlocks, and ``KeyError`` or ``IndexError`` when a
    duration is missing.
    """
    ranks = stage_ranks(schedule)
    per_stage = {
        "forward": forward_seconds,
        "backward": backward_seconds,
        "weight": weight_seconds,
        "head": defaultdict(float),  # it is counted in the forwards and backwards
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


_Row = list[tuple[int, int]]  # (kind * stages + stage, microbatch) of a rank's actions
_KINDS = ("forward", "backward", "weight")


@dataclass(frozen=True)
class Played:
    """The end of a step, and the compute seconds of each rank."""

    makespan: float
    busy: tuple[float, ...]


def play(
    shape: tuple[str, int, int, int],
    seconds: tuple[Sequence[float], Sequence[float], Sequence[float]],
    edge_seconds: Mapping[tuple[int, int, str], float],
    reduce_seconds: Sequence[float],
) -> Played:
    """The result of `simulate` for the table of `shape`, (name, ranks, stages of a rank,
    microbatches), with its messages, without building either: identical sums in the same order.

    seconds: of forward, backward and weight, per stage. A message has arrived when it is needed, or
    its rank waits, so receives need no place in a list; early messages block nothing.
    """
    durations = tuple(tuple(each) for each in seconds)
    ends, busy = _ends(shape, durations, tuple(sorted(edge_seconds.items())))
    clock = []
    for end, stages in zip(ends, _last_stages(*shape), strict=True):
        for stage in stages:
            end += reduce_seconds[stage]
        clock.append(end)
    return Played(max(clock, default=0.0), busy)


_Needed = tuple[list[float], int]
"""Arrivals by microbatch, and edge."""
_Sent = tuple[list[float], float, int, int, int]
"""Arrivals by microbatch, seconds on the way, channel, edge, and the rank that reads."""


def _messages(
    ranks: int,
    stages: int,
    microbatches: int,
    edge_seconds: tuple[tuple[tuple[int, int, str], float], ...],
) -> tuple[defaultdict[int, list[_Sent]], defaultdict[int, list[_Needed]], int]:
    """What each job sends, what each needs (arrivals and edge), and how many channels there are: a
    job is a stage's forward or backward, a channel joins two ranks in one direction."""
    outgoing: defaultdict[int, list[_Sent]] = defaultdict(list)
    incoming: defaultdict[int, list[_Needed]] = defaultdict(list)
    channels: dict[tuple[int, int, str], int] = {}
    for edge, ((source, destination, way), took) in enumerate(edge_seconds):
        a, b = source % ranks, destination % ranks
        if a != b:
            channel = channels.setdefault((a, b, way), len(channels))
            kind, arrival = _KINDS.index(way), [-1.0] * microbatches
            outgoing[kind * stages + source].append((arrival, took, channel, edge, b))
            incoming[kind * stages + destination].append((arrival, edge))
    return outgoing, incoming, len(channels)


@lru_cache(maxsize=64)
def _ends(
    shape: tuple[str, int, int, int],
    seconds: tuple[tuple[float, ...], ...],
    edge_seconds: tuple[tuple[tuple[int, int, str], float], ...],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(when each rank has done the last of its microbatches, its compute seconds); cached, because
    plans that differ only in what they reduce share it."""
    _, ranks, per_rank, microbatches = shape
    rows, stages = _rows(*shape), ranks * per_rank
    outgoing, incoming, channels = _messages(ranks, stages, microbatches, edge_seconds)
    jobs = [
        (took, incoming[at], outgoing[at])
        for at, took in enumerate(took for each in seconds for took in each)
    ]
    free = [0.0] * channels
    clock, busy, at = [0.0] * ranks, [0.0] * ranks, [0] * ranks
    wanted = [-1] * len(edge_seconds)  # by edge: the microbatch whose message a rank waits for
    runnable = list(range(ranks))
    while runnable:
        rank = runnable.pop()
        row, place, now, worked = rows[rank], at[rank], clock[rank], busy[rank]
        while place < len(row):
            job, number = row[place]
            took, needed, sent = jobs[job]
            missing = -1
            for arrival, edge in needed:
                arrived = arrival[number]
                if arrived < 0.0:
                    missing = edge
                    break
                if arrived > now:
                    now = arrived
            if missing >= 0:
                wanted[missing] = number
                break
            now += took
            worked += took
            for arrival, length, channel, edge, reader in sent:
                end = free[channel]
                if end < now:
                    end = now
                end += length
                free[channel] = arrival[number] = end
                if wanted[edge] == number:
                    wanted[edge] = -1
                    runnable.append(reader)
            place += 1
        at[rank], clock[rank], busy[rank] = place, now, worked
    waiting = sorted({key[1] % ranks for (key, _), number in zip(edge_seconds, wanted, strict=True)
                      if number >= 0})  # fmt: skip
    if waiting:
        raise ValueError(f"deadlock: ranks {waiting} wait for ever")
    return tuple(clock), tuple(busy)


@lru_cache(maxsize=8)
def _rows(name: str, ranks: int, per_rank: int, microbatches: int) -> tuple[_Row, ...]:
    table = build(name, ranks, per_rank, microbatches)
    start = {kind: number * ranks * per_rank for number, kind in enumerate(_KINDS)}
    return tuple([(start[a.kind] + a.stage, a.microbatch) for a in row] for row in table)


@lru_cache(maxsize=8)
def _last_stages(name: str, ranks: int, per_rank: int, microbatches: int) -> list[list[int]]:
    """The stages of each rank, in the order in which they finish."""
    results = []
    for row in _rows(name, ranks, per_rank, microbatches):
        last = {job % (ranks * per_rank): index for index, (job, _) in enumerate(row)}
        results.append(sorted(last, key=last.__getitem__))
    return results
