"""Adds the messages between pipeline stages to an action table.

before::

    F0.0 B0.0
    F1.0 B1.0

after ``with_communication(table, {(0, 1)}, {(1, 0)})``::

    F0.0 SF0>1.0 RB1>0.0 B0.0 G0
    RF0>1.0 F1.0 B1.0 SB1>0.0 G1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TypeAlias

from graphaccel.schedule.table import Action, Direction, Schedule, stage_ranks

Edge: TypeAlias = tuple[int, int]  # (source stage, destination stage)
Message: TypeAlias = tuple[Edge, int]  # (edge, microbatch)
Channel: TypeAlias = tuple[int, int, str]  # (source rank, destination rank, direction)


def with_communication(
    table: Schedule, forward_edges: frozenset[Edge], backward_edges: frozenset[Edge]
) -> Schedule:
    """``table`` with one message per (edge, microbatch, direction) and closing reductions.

    ``forward_edges`` and ``backward_edges`` are (source stage, destination stage) pairs; a forward
    edge goes to a later stage, a backward edge to an earlier one, any number of stages away. Edges
    between two stages of one rank carry no message. A send follows the action that produces its
    value; a receive precedes the action that consumes it. Each rank's list ends with one ``reduce``
    per local stage, in the order in which the stages finish their last gradient.

    Messages that share a channel (source rank, destination rank, direction) are received in the
    order in which they are sent, which is what NCCL needs, as it has no tags: where an edge that
    skips stages would be received late, its receive is pulled forward to just before the next one
    that was sent after it. That cannot add waiting: what was sent earlier arrives earlier. One
    communicator per channel is therefore enough, and one per *unordered* pair is not: with two
    ranks and interleaving, activations flow both ways between them.

    Raises ``ValueError`` when an edge names an unknown stage or points the wrong way, or when the
    table already holds messages or reductions.
    """
    ranks = stage_ranks(table)
    check_edges(ranks, forward_edges, backward_edges)
    edges: dict[str, frozenset[Edge]] = {"forward": forward_edges, "backward": backward_edges}
    outgoing: dict[tuple[str, int], list[int]] = defaultdict(list)
    incoming: dict[tuple[str, int], list[int]] = defaultdict(list)
    for direction, pairs in edges.items():
        for source, destination in sorted(pairs):
            if ranks[source] != ranks[destination]:
                outgoing[direction, source].append(destination)
                incoming[direction, destination].append(source)

    receives = _Receives(_sends(table, ranks, outgoing))
    lists: list[tuple[Action, ...]] = []
    for rank, actions in enumerate(table):
        result: list[Action] = []
        for action in actions:
            if action.kind in ("weight", "head"):  # it sends and receives nothing
                result.append(action)
                continue
            direction = _direction(action)
            for peer in incoming[direction, action.stage]:
                result += receives.before(action, peer, (ranks[peer], rank, direction))
            result.append(action)
            for peer in outgoing[direction, action.stage]:
                result.append(Action("send", action.stage, action.microbatch, peer, direction))
        lists.append((*result, *_reductions(actions)))
    return tuple(lists)


def _sends(
    table: Schedule, ranks: Mapping[int, int], outgoing: Mapping[tuple[str, int], list[int]]
) -> dict[Channel, list[Message]]:
    """The messages of each channel, in the order in which they are sent."""
    sends: dict[Channel, list[Message]] = defaultdict(list)
    for rank, actions in enumerate(table):
        for action in actions:
            for peer in outgoing.get((action.kind, action.stage), ()):
                channel = (rank, ranks[peer], action.kind)
                sends[channel].append(((action.stage, peer), action.microbatch))
    return sends


class _Receives:
    """Receives the messages of each channel in the order in which they are sent."""

    def __init__(self, sends: Mapping[Channel, list[Message]]) -> None:
        self._sends = sends
        self._position = {
            (channel, message): index
            for channel, messages in sends.items()
            for index, message in enumerate(messages)
        }
        self._received: dict[Channel, int] = defaultdict(int)  # messages received so far

    def before(self, action: Action, peer: int, channel: Channel) -> list[Action]:
        """The receives before an action that reads a message of stage `peer`: that message, and
        those that the channel sends before it."""
        message = ((peer, action.stage), action.microbatch)
        if (channel, message) not in self._position:
            raise ValueError(f"{action} needs stage {peer}, which never computes it")
        first, end = self._received[channel], self._position[channel, message] + 1
        self._received[channel] = max(first, end)
        return [
            Action("receive", destination, microbatch, source, _direction(action))
            for (source, destination), microbatch in self._sends[channel][first:end]
        ]


def check_edges(
    stages: Collection[int], forward_edges: frozenset[Edge], backward_edges: frozenset[Edge]
) -> None:
    """Raise ``ValueError`` for an edge that names an unknown stage or points the wrong way."""
    for way, where, sign, edges in (
        ("forward", "a later", 1, forward_edges),
        ("backward", "an earlier", -1, backward_edges),
    ):
        for source, destination in sorted(edges):
            edge = f"{way} edge {source} -> {destination}"
            if source not in stages or destination not in stages:
                raise ValueError(f"{edge} names a stage that no rank computes")
            if (destination - source) * sign <= 0:
                raise ValueError(f"{edge} does not go to {where} stage")


def _direction(action: Action) -> Direction:
    """Which way the values of a computing action flow; raises ``ValueError`` for any other."""
    if action.kind == "forward" or action.kind == "backward":
        return action.kind
    raise ValueError(f"the table already holds {action}; give one that only computes")


def _reductions(actions: tuple[Action, ...]) -> list[Action]:
    """One ``reduce`` per stage of ``actions``, ordered by the stage's last action."""
    last = {action.stage: index for index, action in enumerate(actions)}
    return [Action("reduce", stage, -1) for stage in sorted(last, key=last.__getitem__)]
