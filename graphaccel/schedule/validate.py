"""Validates an action table (completeness, message order, no deadlock) before a process runs it.

What must hold: every stage runs every microbatch forward and backward exactly once (and its weight
part, where the table has such), on its own rank; every value that crosses ranks is sent once and
received once, after it exists and before it is used; no rank waits for ever; messages of one
channel arrive in the order they were sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from graphaccel.schedule.communicate import Channel, Edge, check_edges
from graphaccel.schedule.table import COMPUTING, Action, Schedule, stage_ranks


def validate(
    schedule: Schedule,
    stage_rank: Mapping[int, int],
    forward_edges: frozenset[Edge] = frozenset(),
    backward_edges: frozenset[Edge] = frozenset(),
) -> None:
    """Raise ``ValueError`` naming the first fault found in a table with its messages.

    ``stage_rank`` says which rank each stage belongs to; the edges are (source stage, destination
    stage) pairs as given to ``with_communication``. The checks, in order: each (stage, microbatch)
    once forward, then once backward (then once weight), on the stage's rank, a head between all
    forwards and all backwards; one closing reduction
    per stage; one send and one receive for each edge between ranks and microbatch, and no others;
    values exist before they are used; no deadlock when sends are buffered; sends and receives in
    the same order.
    """
    check_edges(stage_rank, forward_edges, backward_edges)
    places = _places(schedule)
    microbatches = _check_compute(schedule, stage_rank, places)
    _check_reductions(schedule, stage_rank, places)
    expected: Counter[Action] = Counter()
    ways: dict[Literal["forward", "backward"], frozenset[Edge]] = {
        "forward": forward_edges,
        "backward": backward_edges,
    }
    for direction, edges in ways.items():
        for source, destination in sorted(edges):
            for microbatch in range(microbatches):
                producer = Action(direction, source, microbatch)
                consumer = Action(direction, destination, microbatch)
                if stage_rank[source] == stage_rank[destination]:
                    _check_before(places, producer, consumer)
                    continue
                send = Action("send", source, microbatch, destination, direction)
                receive = Action("receive", destination, microbatch, source, direction)
                expected.update((send, receive))
                for message in (send, receive):
                    if message not in places:
                        raise ValueError(f"{message} is missing")
                _check_before(places, producer, send)
                _check_before(places, receive, consumer)
    _check_messages(schedule, expected)
    execution_order(schedule)
    if not fifo_consistent(schedule):
        raise ValueError("messages of one channel are received in another order than they are sent")


def execution_order(schedule: Schedule) -> list[tuple[int, int]]:
    """One order, as (rank, index) pairs, in which all actions can run; sends are buffered.

    Every receive comes after its send in it. Deterministic; linear in the number of actions.
    Raises ``ValueError`` saying what each blocked rank waits for when the table deadlocks.
    """
    position = [0] * len(schedule)
    sent: set[tuple[int, int, int, str]] = set()
    waiting: dict[tuple[int, int, int, str], int] = {}  # message -> the rank that waits for it
    order: list[tuple[int, int]] = []
    runnable = list(range(len(schedule)))
    while runnable:
        rank = runnable.pop()
        actions = schedule[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            if action.kind in ("send", "receive"):
                message = (*action.message, action.microbatch, action.direction)
                if action.kind == "send":
                    sent.add(message)
                    if message in waiting:
                        runnable.append(waiting.pop(message))
                elif message not in sent:
                    waiting[message] = rank
                    break
            order.append((rank, position[rank]))
            position[rank] += 1
    if waiting:
        blocked = ", ".join(
            f"rank {rank} waits at {schedule[rank][position[rank]]}"
            for rank in sorted(waiting.values())
        )
        raise ValueError(f"deadlock: {blocked}")
    return order


def fifo_consistent(schedule: Schedule) -> bool:
    """Whether each channel's messages are received in the order in which they are sent.

    A channel is (source rank, destination rank, direction). NCCL matches messages by order alone,
    so with one communicator per channel this is what it needs.
    """
    computed = {
        action.stage: rank
        for rank, actions in enumerate(schedule)
        for action in actions
        if action.kind == "forward"
    }
    sends: dict[Channel, list[tuple[int, int, int]]] = defaultdict(list)
    receives: dict[Channel, list[tuple[int, int, int]]] = defaultdict(list)
    for actions in schedule:
        for action in actions:
            if action.kind in ("send", "receive"):
                source, destination = action.message
                channel = (computed[source], computed[destination], action.direction)
                queue = sends if action.kind == "send" else receives
                queue[channel].append((source, destination, action.microbatch))
    return sends == receives


@dataclass(frozen=True)
class Moment:
    """What a rank holds while it computes.

    ``held`` has an entry for each local stage: how many microbatches have finished their forward
    and not their backward, or not their weight part where the table has such. It leaves out a
    microbatch whose forward is running and counts one whose backward is.
    """

    kind: Literal["forward", "backward", "weight"]
    stage: int
    held: Mapping[int, int]


def occupancy(schedule: Schedule) -> tuple[tuple[Moment, ...], ...]:
    """Per rank, every distinct ``Moment`` in order of first appearance.

    The peak memory of a rank is the maximum, over its moments, of what the held microbatches save
    plus what the running forward or backward needs. For several stages per rank that is less than
    the sum of each stage's ``in_flight``, as they do not peak together.
    """
    ranks: list[tuple[Moment, ...]] = []
    local: list[list[int]] = [[] for _ in schedule]
    for stage, rank in stage_ranks(schedule).items():
        local[rank].append(stage)
    for rank, actions in enumerate(schedule):
        last = "weight" if any(a.kind == "weight" for a in actions) else "backward"
        held = dict.fromkeys(local[rank], 0)
        seen: dict[tuple[str, int, tuple[int, ...]], Moment] = {}
        for action in actions:
            kind = action.kind
            if kind == "forward" or kind == "backward" or kind == "weight":
                key = (kind, action.stage, tuple(held.values()))
                if key not in seen:
                    seen[key] = Moment(kind, action.stage, dict(held))
                held[action.stage] += (kind == "forward") - (kind == last)
        ranks.append(tuple(seen.values()))
    return tuple(ranks)


def in_flight(schedule: Schedule) -> dict[int, int]:
    """Stage -> the most microbatches it holds at once (forward done, gradients not yet)."""
    most: dict[int, int] = {}
    for moments in occupancy(schedule):
        for moment in moments:
            for stage, count in moment.held.items():
                most[stage] = max(most.get(stage, 0), count)
    return dict(sorted(most.items()))


def _places(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Action -> (rank, index); raises ``ValueError`` for an action that occurs twice."""
    places: dict[Action, tuple[int, int]] = {}
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            if action in places:
                raise ValueError(f"{action} occurs twice, on ranks {places[action][0]} and {rank}")
            places[action] = (rank, index)
    return places


def _check_compute(
    schedule: Schedule, stage_rank: Mapping[int, int], places: Mapping[Action, tuple[int, int]]
) -> int:
    """Check forwards and backwards; the number of microbatches."""
    computing = [a for actions in schedule for a in actions if a.kind in COMPUTING]
    apart = any(a.kind == "weight" for a in computing)
    microbatches = 1 + max((action.microbatch for action in computing), default=-1)
    for action in computing:
        if action.stage not in stage_rank:
            raise ValueError(f"{action} belongs to no known stage")
    for stage, rank in stage_rank.items():
        for microbatch in range(microbatches):
            parts = [Action("forward", stage, microbatch), Action("backward", stage, microbatch)]
            parts += [Action("weight", stage, microbatch)] if apart else []
            for action in parts:
                if action not in places:
                    raise ValueError(f"{action} is missing")
                if places[action][0] != rank:
                    raise ValueError(f"{action} is on rank {places[action][0]}, not {rank}")
            once = Action("head", stage, -1)
            if once in places:
                parts.insert(1, once)
            for first, second in pairwise(parts):
                _check_before(places, first, second)
    return microbatches


def _check_reductions(
    schedule: Schedule, stage_rank: Mapping[int, int], places: Mapping[Action, tuple[int, int]]
) -> None:
    reductions = {a for actions in schedule for a in actions if a.kind == "reduce"}
    for action in sorted(reductions, key=str):
        if action.stage not in stage_rank or places[action][0] != stage_rank[action.stage]:
            raise ValueError(f"{action} is on rank {places[action][0]}, which is not its own")
    for stage, rank in stage_rank.items():
        closing = Action("reduce", stage, -1)
        if closing not in reductions:
            raise ValueError(f"{closing} is missing")
        for action in schedule[rank]:
            if action.kind in ("backward", "weight") and action.stage == stage:
                _check_before(places, action, closing)


def _check_before(places: Mapping[Action, tuple[int, int]], first: Action, second: Action) -> None:
    if places[first][0] != places[second][0]:
        raise ValueError(f"{first} and {second} are on different ranks")
    if places[first][1] > places[second][1]:
        raise ValueError(f"{second} comes before {first}")


def _check_messages(schedule: Schedule, expected: Counter[Action]) -> None:
    for actions in schedule:
        for action in actions:
            if action.kind in ("send", "receive") and action not in expected:
                raise ValueError(f"{action} belongs to no edge")
