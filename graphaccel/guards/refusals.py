"""Errors about Python values that a captured step cannot follow (GA106)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphaccel.errors import StateFrozen
from graphaccel.errors.messages import Location
from graphaccel.guards.guards import Change
from graphaccel.guards.lines import location, writes_name
from graphaccel.guards.place import Place
from graphaccel.guards.system import ASKS_FILES, ASKS_OTHERS, OPENS, Question


def too_many(change: Change, most: int) -> StateFrozen:
    """For a value that changes from step to step, and cannot be an input of the graph. most: number
    of captures for it."""
    name, value = change.place.name, change.now if change.place.is_number else "0.5"
    return _refused(
        change,
        what=f"`{name}` had {most} values, each with a capture of its own, and is now {change.now}",
        note="this does something with it that a tensor can not stand for",
        reason="a capture takes seconds; numbers that arithmetic with tensors reads need none",
        help_line="hold it in a tensor, which the forward reads and the script fills:  "
        f"model.{name} = torch.tensor({value})",
    )


def too_many_values(change: Change) -> StateFrozen:
    """For a buffer whose values the forward asks for, and that has other ones again and again."""
    return _refused(
        change,
        what=f"the forward asks for the value of the buffer `{change.place.name}`, which has "
        f"another one again: {change.now}",
        note="the graph has the branch for one value",
        reason="a capture takes seconds; a flag that is set once is followed, a count is not",
        help_line="leave it a tensor:  x = torch.where(self.count < 10, a, b)",
    )


def unsteady(change: Change) -> StateFrozen:
    """For a value that already changed when the step that was captured with it starts."""
    name = change.place.name
    last = name.rpartition(".")[2]
    if last == "is_grad_enabled()":
        return _refused(
            change,
            what="the forward asks `torch.is_grad_enabled()`, and is evaluated by a graph",
            note="the graph has the branch with gradients",
            reason="a graph is captured with gradients enabled, also where they are not",
            help_line="ask whether it is trained:  if self.training:",
        )
    if writes_name(change.place.line):
        return _refused(
            change,
            what=f"the forward sets `{name}`, to another value for other sizes of a batch",
            note="the forward writes it",
            reason="a step runs a graph, which writes no Python values",
            help_line=f"set it in the script alone, before each step:  {last} = len(batch)",
        )
    return _refused(
        change,
        what=f"`{change.place.name}` was {change.before} at capture and is {change.now} when the "
        "step starts",
        note="the forward reads it",
        reason="a graph can not follow a value that changes between two looks at it",
        help_line="set it before the call of the model, and leave it until the call returns",
    )


_ASKED = {
    OPENS: (
        "a graph would keep what it held at capture",
        "read it in the script, before each step:  model.settings = json.load(open(path))",
    ),
    ASKS_FILES: (
        "a graph would keep the answer that it got at capture",
        "ask in the script, before each step, and read that in the forward:  "
        "model.found = os.path.exists(path)",
    ),
    ASKS_OTHERS: (
        "a graph would keep the answer that it got at capture",
        "ask in the script, before each step, and read that in the forward:  "
        "model.answer = subprocess.check_output(command)",
    ),
}


def asks_outside(forward: str, question: Question) -> StateFrozen:
    """For what the forward asks of files or of another process. forward: `Class.forward`."""
    note, line = _ASKED[question.what]
    return StateFrozen(
        what=f"`{forward}` {question.what}",
        location=question.line,
        note=note,
        reason="the script's own model does not run: its graph does, and that knows no Python",
        help_lines=(line,),
    )


def writes_to_argument(name: str, line: Location | None) -> StateFrozen:
    """For a list, dict or object of the call into which the forward puts something."""
    return StateFrozen(
        what=f"the forward puts something into what it is called with: `{name}`",
        location=line,
        note="written here",
        reason="a step runs a graph, which gives what the forward returns; the script's own "
        "container stays as it is",
        help_lines=(
            "return it:  return output, value",
            "or, if the script does not read it, copy the container in the forward:  "
            "batch = dict(batch)",
        ),
    )


def refuse_iterators(read: Iterable[Place]) -> None:
    """Raises StateFrozen (GA106) for an iterator of Python's, whose position cannot be compared."""
    for place in read:
        kind = type(place.value)
        if kind.__module__ in ("builtins", "itertools") and isinstance(place.value, Iterator):
            raise StateFrozen(
                what=f"`{place.name}` is an iterator ({kind.__name__}), which the forward reads",
                location=location(place.line),
                note="the forward reads it",
                reason="a graph would keep the value that it gave at capture",
                help_lines=(
                    "take the value in the script, before each step:  model.value = next(iterator)",
                ),
            )


def _refused(change: Change, *, what: str, note: str, reason: str, help_line: str) -> StateFrozen:
    return StateFrozen(
        what=what,
        location=location(change.place.line),
        note=note,
        reason=reason,
        help_lines=(help_line,),
    )
