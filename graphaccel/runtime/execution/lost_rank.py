"""Recognises a backend's error about another rank, and names the action that waited for it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable

from torch import fx

from graphaccel.schedule.table import Action


def is_connection(error: RuntimeError) -> bool:
    """Whether a backend's error is about another rank, not about this rank's own computation."""
    text = str(error).lower()
    signs = ("connection", "timed out", "timeout", "gloo", "nccl", "peer", "socket", "broken pipe")
    return any(sign in text for sign in signs)


def first_line(error: RuntimeError) -> str:
    """The first line of a backend's error message, without the location in its source."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0])


def module_of(error: RuntimeError, graphs: Iterable[fx.GraphModule]) -> str:
    """The module of the node that raised an error in one of these graphs; "" where none did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.line for f in frames if f.filename.startswith("<eval_with_key>") and f.line]
    if not lines:
        return ""
    name = re.split(r"[\s:=]", lines[-1].strip(), maxsplit=1)[0]
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    return next((n.meta.get("module", "") for n in nodes if n.name == name), "")


def described(action: Action) -> str:
    """An action in words, for an error."""
    if action.kind == "weight":
        return f"weight gradients of microbatch {action.microbatch}, stage {action.stage}"
    if action.kind == "head":
        return f"what needs the whole batch at once, stage {action.stage}"
    if action.kind in ("forward", "backward"):
        return f"{action.kind} of microbatch {action.microbatch}, stage {action.stage}"
    if action.kind == "reduce":
        return f"sum of the gradients of stage {action.stage} over the data axis"
    what = "values" if action.direction == "forward" else "gradients"
    where = "from" if action.kind == "receive" else "to"
    return f"{what} of microbatch {action.microbatch} {where} stage {action.peer}"
