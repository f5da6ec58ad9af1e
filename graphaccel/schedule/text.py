"""Draws a pipeline schedule as text for a terminal.

Four stages, eight microbatches, a backward twice as long as a forward::

    stage 0 |0123......aa4bb5cc6dd7ee.ff.gg.hh|
    stage 1 |.012....aa3bb4cc5dd6ee7ff.gg.hh..|
    stage 2 |..01..aa2bb3cc4dd5ee6ff7gg.hh....|
    stage 3 |...0aa1bb2cc3dd4ee5ff6gg7hh......|
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase, digits

from graphaccel.schedule.table import Action, Schedule, stage_ranks

LEGEND = (
    "digits = forward, letters = backward of the same microbatch, + = reduce gradients, . = idle"
)
LEGEND_APART = (
    "digits = forward, letters = backward, capitals = its weights' part, + = reduce gradients, "
    ". = idle"
)


def gantt(schedule: Schedule, spans: Sequence[Sequence[tuple[float, float]]], width: int) -> str:
    """One line per rank, ``width`` columns of time; ``LEGEND`` explains the marks.

    ``spans`` holds (start, end) in seconds for each action of each rank, as ``simulate`` or a
    measurement gives them; a column shows what the rank does at the column's middle. Microbatches
    from the eleventh forward and the twenty-seventh backward on start again at 0 and a.

    Raises ``ValueError`` when ``spans`` does not match the schedule or ``width`` is below one.
    """
    if width < 1:
        raise ValueError(f"a picture needs at least one column, not {width}")
    if [len(actions) for actions in schedule] != [len(row) for row in spans]:
        raise ValueError("spans must hold one (start, end) for each action of each rank")
    total = max((end for row in spans for _, end in row), default=0.0)
    names = _row_names(schedule)
    margin = max(map(len, names), default=0)
    return "\n".join(
        f"{name:<{margin}} |{_row(actions, row, total, width)}|"
        for name, actions, row in zip(names, schedule, spans, strict=True)
    )


def _row(
    actions: Sequence[Action], row: Sequence[tuple[float, float]], total: float, width: int
) -> str:
    drawn = [
        (start, end, mark)
        for action, (start, end) in zip(actions, row, strict=True)
        if (mark := _mark(action)) and end > start
    ]
    columns: list[str] = []
    index = 0
    for column in range(width):
        middle = (column + 0.5) * total / width
        while index < len(drawn) and drawn[index][1] <= middle:
            index += 1
        busy = index < len(drawn) and drawn[index][0] <= middle
        columns.append(drawn[index][2] if busy else ".")
    return "".join(columns)


def _mark(action: Action) -> str:
    """The character an action is drawn with; empty for messages, which overlap computing."""
    if action.kind == "forward":
        return digits[action.microbatch % len(digits)]
    if action.kind == "backward":
        return ascii_lowercase[action.microbatch % len(ascii_lowercase)]
    if action.kind == "weight":
        return ascii_uppercase[action.microbatch % len(ascii_uppercase)]
    return "+" if action.kind == "reduce" else ""


def _row_names(schedule: Schedule) -> list[str]:
    stages: list[list[str]] = [[] for _ in schedule]
    for stage, rank in stage_ranks(schedule).items():
        stages[rank].append(str(stage))
    return [f"stage{'s' * (len(own) > 1)} {','.join(own)}" for own in stages]
