"""Walks one rank's list of actions: when buffers are allocated and when they can be freed.

The executor does what `walk` yields, and the memory model counts what `walk` yields, so they cannot
disagree. The rules:
  post      the buffers of the receives that stand before the next computing action are posted
            before the current one runs: one action ahead, so that the message is overlapped
  wait      before an action runs, for the messages it consumes
  release   what a stage's forward sent is held until that microbatch's backward (its gradient
            implies that it arrived); what a backward sent to the stage below, until the next
            backward of the sender has run. Further down it takes as many backwards as there are
            stages between: waiting any earlier would stall the sender, and with interleaved stages
            for ever. Where a rank holds stages between sender and receiver, it is the lowest of
            them whose backwards count
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from graphaccel.schedule.table import COMPUTING, Action

Verb: TypeAlias = Literal["post", "wait", "run", "send", "release", "reduce"]


@dataclass(frozen=True, slots=True)
class Doing:
    """One thing to do: `action` is the receive to post or wait for, the forward, backward or weight
    to run, the send to issue, or the send whose tensors are released."""

    verb: Verb
    action: Action


def range_name(step: Doing) -> str:
    """What torch's profiler shows of a step: `graphaccel: forward, stage 0, microbatch 3`."""
    action = step.action
    said = action.kind if step.verb in ("run", "send", "reduce") else f"{step.verb} {action.kind}"
    said += f" {action.direction}" * bool(action.direction) + f", stage {action.stage}"
    said += f" with {action.peer}" * (action.peer >= 0)
    return f"graphaccel: {said}" + f", microbatch {action.microbatch}" * (action.microbatch >= 0)


def walk(actions: Sequence[Action]) -> Iterator[Doing]:
    """What a rank does, in order."""
    computing = [i for i, a in enumerate(actions) if a.kind in COMPUTING]
    waiting: list[Action] = []
    unreleased: list[Action] = []
    done: dict[int, list[int]] = {}  # microbatches whose backward has run, by stage
    stages = sorted({a.stage for a in actions if a.kind == "backward"})
    previous = 0
    if computing:
        for action in actions[: computing[0]]:
            yield from _posted(action, waiting)
        previous = computing[0] + 1
    for order, index in enumerate(computing):
        action = actions[index]
        until = computing[order + 1] if order + 1 < len(computing) else len(actions)
        for later in actions[previous:until]:
            yield from _posted(later, waiting)
        previous = until + 1
        for message in [w for w in waiting if _consumed(w, action)]:
            yield Doing("wait", message)
            waiting.remove(message)
        if action.kind == "backward":
            for sent in [s for s in unreleased if _acknowledged(s, action)]:
                yield Doing("release", sent)
                unreleased.remove(sent)
        yield Doing("run", action)
        if action.kind == "backward":
            done.setdefault(action.stage, []).append(action.microbatch)
            for sent in [s for s in unreleased if _passed(s, stages, done)]:
                yield Doing("release", sent)
                unreleased.remove(sent)
        for later in actions[index + 1 : until]:
            if later.kind == "send":
                yield Doing("send", later)
                unreleased.append(later)
            elif later.kind == "reduce":
                yield Doing("reduce", later)
    for sent in unreleased:
        yield Doing("release", sent)


def last_actions(actions: Sequence[Action]) -> frozenset[Action]:
    """The last computing action of each stage, after which its buffers can be freed."""
    return frozenset({a.stage: a for a in actions if a.kind in COMPUTING}.values())


def _posted(action: Action, waiting: list[Action]) -> Iterator[Doing]:
    if action.kind == "receive":
        waiting.append(action)
        yield Doing("post", action)


def _consumed(message: Action, action: Action) -> bool:
    return (message.stage, message.microbatch, message.direction) == (
        action.stage,
        action.microbatch,
        action.kind,
    )


def _acknowledged(sent: Action, action: Action) -> bool:
    return sent.direction == "forward" and (sent.stage, sent.microbatch) == (
        action.stage,
        action.microbatch,
    )


def _passed(sent: Action, stages: Sequence[int], done: Mapping[int, Sequence[int]]) -> bool:
    """Whether the receiver of a backward's message must have received it by now."""
    if sent.direction != "backward":
        return False
    above = next(local for local in stages if local > sent.peer)
    past = done.get(above, ())
    return sent.microbatch in past[: -(above - sent.peer)]
