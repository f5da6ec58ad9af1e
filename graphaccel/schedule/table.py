"""Pipeline schedules (GPipe, 1F1B, interleaved, zero-bubble) as a table of actions per rank.

A schedule is a pure function of (ranks, stages per rank, microbatches). It is one tuple of actions
per pipeline rank, in order. Stage ``k`` is on rank ``k % ranks``; with one stage per rank, stage
and rank are the same number. The tables built here contain forwards and backwards only;
``schedule.communicate.with_communication`` adds the messages between stages.

All three schedules run the microbatches of a stage in ascending order, forward and backward, so
the gradients of a stage are summed in the same order whichever schedule was chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["forward", "backward", "weight", "head", "send", "receive", "reduce"]
Direction: TypeAlias = Literal["forward", "backward", ""]

SCHEDULE_NAMES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")
COMPUTING: tuple[str, ...] = ("forward", "backward", "weight", "head")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    ``stage`` is the stage on this rank; ``peer`` is the *stage* (not the rank) at the other end of
    a send or receive, -1 otherwise; ``direction`` says whether a message carries activations
    ("forward") or their gradients ("backward"). ``reduce`` sums the gradients of a stage over its
    replicas once all microbatches are done, so its ``microbatch`` is -1.

    ``weight`` is the part of a backward that computes the gradients of parameters, where a schedule
    separates it; ``backward`` is then the part that other stages wait for. ``head`` runs once on
    the whole batch, between the forwards and the backwards of its stage; its ``microbatch`` is -1.

    The text form names messages by source and destination stage:
    ``F0.3`` ``B1.2`` ``W1.2`` ``SF0>1.3`` (stage 0 sends) ``RF0>1.3`` (stage 1 receives)
    ``RB1>0.2`` ``G0`` ``H1``.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int = -1
    direction: Direction = ""

    def __str__(self) -> str:
        if self.kind == "forward":
            return f"F{self.stage}.{self.microbatch}"
        if self.kind == "backward":
            return f"B{self.stage}.{self.microbatch}"
        if self.kind == "weight":
            return f"W{self.stage}.{self.microbatch}"
        if self.kind == "reduce":
            return f"G{self.stage}"
        if self.kind == "head":
            return f"H{self.stage}"
        source, destination = self.message
        letters = f"{self.kind[0]}{self.direction[0]}".upper()
        return f"{letters}{source}>{destination}.{self.microbatch}"

    @property
    def message(self) -> tuple[int, int]:
        """(source stage, destination stage) of a send or receive.

        Raises ``ValueError`` for an action that carries no message.
        """
        if self.kind == "send":
            return self.stage, self.peer
        if self.kind == "receive":
            return self.peer, self.stage
        raise ValueError(f"{self} is no message")


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards; every stage holds every microbatch at its peak.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019 (arXiv:1811.06965). Backwards run in ascending order here (see the module
    docstring).
    Raises ``ValueError`` when a count is below one.
    """
    _check_counts(stages, 1, microbatches)
    return tuple(
        tuple(Action("forward", stage, k) for k in range(microbatches))
        + tuple(Action("backward", stage, k) for k in range(microbatches))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward: stage ``s`` never holds more than ``stages - s`` microbatches.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019
    (arXiv:1806.03377), with the flush after each step of "Memory-Efficient Pipeline-Parallel DNN
    Training" (PipeDream-Flush, arXiv:2006.09503). Same bubble as GPipe, (p - 1) / (m + p - 1).
    Raises ``ValueError`` when a count is below one.
    """
    _check_counts(stages, 1, microbatches)
    return tuple(
        _alternate(
            [Action("forward", stage, k) for k in range(microbatches)],
            [Action("backward", stage, k) for k in range(microbatches)],
            warmup=stages - 1 - stage,
        )
        for stage in range(stages)
    )


def interleaved(ranks: int, per_rank: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B: rank ``r`` holds stages ``r, r + ranks, r + 2 * ranks, ...``.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021 (arXiv:2104.04473), section 2.2. Microbatches go in groups of ``ranks``;
    a group passes through the first local stage, then the second, and so on. The bubble shrinks to
    (p - 1) / (v * m + p - 1) for v stages per rank, the messages grow by v.

    Any number of microbatches is taken. A ragged last group is the schedule of the next multiple of
    ``ranks`` with the actions of the missing microbatches left out: microbatches depend on one
    another only by their order on a rank, so leaving some out cannot make a rank wait for more.
    With one stage per rank this is ``one_f_one_b``, which holds fewer microbatches.
    Raises ``ValueError`` when a count is below one.
    """
    _check_counts(ranks, per_rank, microbatches)
    if per_rank == 1:
        return one_f_one_b(ranks, microbatches)
    whole = -(-microbatches // ranks) * ranks
    order = [
        (chunk, start + offset)
        for start in range(0, whole, ranks)
        for chunk in range(per_rank)
        for offset in range(ranks)
    ]
    lists: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = [Action("forward", chunk * ranks + rank, k) for chunk, k in order]
        backwards = [
            Action("backward", (per_rank - 1 - chunk) * ranks + rank, k) for chunk, k in order
        ]
        warmup = 2 * (ranks - 1 - rank) + (per_rank - 1) * ranks
        actions = _alternate(forwards, backwards, warmup)
        lists.append(tuple(action for action in actions if action.microbatch < microbatches))
    return tuple(lists)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """1F1B whose bubble is filled with the gradients of weights, which no stage waits for.

    ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (arXiv:2401.10241), section
    2.3: rank ``s`` runs the weight part of a microbatch ``s`` backwards after the backward itself,
    and the remaining ones at the end. The bubble is (p - 1)(F + B - W) instead of (p - 1)(F + B +
    W); no rank holds more than the p microbatches that rank 0 holds under 1F1B.
    Raises ``ValueError`` when a count is below one.
    """
    _check_counts(stages, 1, microbatches)
    lists: list[tuple[Action, ...]] = []
    for stage, actions in enumerate(one_f_one_b(stages, microbatches)):
        result: list[Action] = []
        for action in actions:
            result.append(action)
            late = action.microbatch - stage
            if action.kind == "backward" and late >= 0:
                result.append(Action("weight", stage, late))
        left = range(max(0, microbatches - stage), microbatches)
        lists.append((*result, *(Action("weight", stage, k) for k in left)))
    return tuple(lists)


def build(name: str, ranks: int, per_rank: int, microbatches: int) -> Schedule:
    """The schedule called ``name`` (one of ``SCHEDULE_NAMES``).

    Raises ``ValueError`` for an unknown name, for several stages per rank where the schedule does
    not support them, and for a count below one.
    """
    if name == "interleaved":
        return interleaved(ranks, per_rank, microbatches)
    simple: dict[str, Callable[[int, int], Schedule]] = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zero_bubble": zero_bubble,
    }
    if name not in simple:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULE_NAMES)}")
    if per_rank != 1:
        raise ValueError(f"{name} holds one stage per rank, not {per_rank}; use 'interleaved'")
    return simple[name](ranks, microbatches)


def with_head(table: Schedule, stage: int) -> Schedule:
    """``table``, a table without messages, with ``stage``'s head action: once on the whole batch.

    Raises ``ValueError`` where a backward of the stage comes before one of its forwards.
    """
    lists: list[tuple[Action, ...]] = []
    for actions in table:
        own = [i for i, a in enumerate(actions) if a.stage == stage]
        ahead = [i for i in own if actions[i].kind == "forward"]
        if not own:
            lists.append(actions)
            continue
        end = ahead[-1] + 1
        if any(actions[i].kind != "forward" for i in own if i < end):
            raise ValueError(f"stage {stage} has a backward before its last forward")
        lists.append((*actions[:end], Action("head", stage, -1), *actions[end:]))
    return tuple(lists)


def stage_ranks(schedule: Schedule) -> dict[int, int]:
    """Stage -> the rank whose list computes it, stages ascending.

    Raises ``ValueError`` when two ranks compute the same stage.
    """
    results: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in COMPUTING:
                owner = results.setdefault(action.stage, rank)
                if owner != rank:
                    raise ValueError(f"stage {action.stage} is on ranks {owner} and {rank}")
    return dict(sorted(results.items()))


def format_schedule(schedule: Schedule) -> str:
    """One line per rank, actions in their text form; ``parse_schedule`` reads it back."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def parse_schedule(text: str) -> Schedule:
    """The inverse of ``format_schedule``. Raises ``ValueError`` for anything but an action."""
    return tuple(
        tuple(parse_action(word) for word in line.split()) for line in text.strip().splitlines()
    )


_COMPUTE = re.compile(r"([FBW])(\d+)\.(\d+)")
_KINDS: Mapping[str, Kind] = MappingProxyType({"F": "forward", "B": "backward", "W": "weight"})
_MESSAGE = re.compile(r"([SR])([FB])(\d+)>(\d+)\.(\d+)")
_ONCE = re.compile(r"([GH])(\d+)")


def parse_action(text: str) -> Action:
    """The action whose text form is ``text``. Raises ``ValueError`` when it is none."""
    if match := _COMPUTE.fullmatch(text):
        letter, stage, microbatch = match.groups()
        return Action(_KINDS[letter], int(stage), int(microbatch))
    if match := _ONCE.fullmatch(text):
        return Action("reduce" if match[1] == "G" else "head", int(match[2]), -1)
    if match := _MESSAGE.fullmatch(text):
        source, destination, microbatch = int(match[3]), int(match[4]), int(match[5])
        direction: Direction = "forward" if match[2] == "F" else "backward"
        if match[1] == "S":
            return Action("send", source, microbatch, destination, direction)
        return Action("receive", destination, microbatch, source, direction)
    raise ValueError(f"{text!r} is no action; expected forms: F0.3 B1.2 W1.2 SF0>1.3 RB1>0.2 G0 H1")


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then forward and backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        actions += [forward, backward]
    return tuple(actions + backwards[steady:])


def _check_counts(ranks: int, per_rank: int, microbatches: int) -> None:
    counts = {"ranks": ranks, "stages per rank": per_rank, "microbatches": microbatches}
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"a schedule needs at least one of its {what}, not {count}")
