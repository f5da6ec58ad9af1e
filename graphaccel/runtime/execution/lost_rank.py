"""Recognises a backend's error about another rank, and names the action that waited for it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from graphaccel.ir.program import StepProgram, Value
from graphaccel.ir.values import returned
from graphaccel.schedule.table import Action

THE_MODEL = "the model itself"
_MOST_MODULES = 3
_Names = Sequence[Sequence[str]]
_HANDED = ("joined", "summed", "same")


def is_connection(error: RuntimeError) -> bool:
    """Whether a backend's error is about another rank, not about this rank's own computation."""
    text = str(error).lower()
    signs = ("connection", "timed out", "timeout", "gloo", "nccl", "peer", "socket", "broken pipe")
    return any(sign in text for sign in signs)


def first_line(error: RuntimeError) -> str:
    """The first line of a backend's error message, without the location in its source."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0])


def module_of(
    error: RuntimeError, graph: Any, values: Sequence[Value] = (), buckets: _Names = ()
) -> str:
    """The module of the node that raised an error in this graph; "" where none did.

    graph: the one that ran, FX code or compiled: names of nodes are those of one graph. values: its
    inputs; buckets: the names in each flat gradient. A node that a pass made belongs to the module
    of the nearest one around it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.line for f in frames if f.filename.startswith("<eval_with_key>") and f.line]
    if not lines or graph is None:
        return ""
    name = re.split(r"[\s:=]", lines[-1].strip(), maxsplit=1)[0]
    nodes = [node for node in graph.graph.nodes if node.name == name]
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    kinds = dict(zip(inputs, values, strict=False))
    read = [kinds[n] for node in nodes for n in node.all_input_nodes if n in kinds]
    if summed := [buckets[int(value.name)] for value in read if value.kind == "bucket"]:
        return modules_of(summed[0])
    return _listed(map(_module, nodes))


def modules_of(names: Iterable[str]) -> str:
    """The modules of parameters and buffers, by their names."""
    return _listed(name.rpartition(".")[0] for name in names)


def values_from(program: StepProgram, action: Action) -> str:
    """The modules whose values an action waits for: what a message carries from stage to stage, or
    what the forwards of a stage hand to its head; "" for another action."""
    if action.kind == "head":
        stage = program.stages[action.stage]
        return _makers(stage.forward, stage.forward_outputs, _HANDED)
    if action.kind not in ("send", "receive"):
        return ""
    ends = (action.stage, action.peer)
    source, destination = ends if action.kind == "send" else ends[::-1]
    stage = program.stages[source]
    if action.direction == "forward":
        return _makers(stage.forward, stage.forward_outputs, ("sent",), destination)
    graph = next(iter(stage.backwards.values()))
    return _makers(graph, stage.backward_outputs, ("sent",), destination)


def _makers(
    graph: fx.GraphModule, values: Sequence[Value], kinds: Sequence[str], peer: int | None = None
) -> str:
    nodes = zip(returned(graph), values, strict=True)
    return _listed(
        _module(node)
        for node, value in nodes
        if isinstance(node, fx.Node)
        and value.kind in kinds
        and (peer is None or peer in value.peers)
    )


def _module(node: fx.Node) -> str:
    """The module of a node, or that of the nearest one around it which has one."""
    near = {node: None}
    for each in (pending := [node]):
        if "module" in each.meta:
            return each.meta["module"] or ""
        further = [n for n in (*each.all_input_nodes, *each.users) if n not in near]
        near |= dict.fromkeys(further)
        pending += further
    return ""


def _listed(modules: Iterable[str]) -> str:
    """Paths of modules in a line: each once, the first few of many."""
    each = list(dict.fromkeys(module or THE_MODEL for module in modules))
    more = len(each) - _MOST_MODULES
    return ", ".join(each[:_MOST_MODULES]) + (f" and {more} more" if more > 0 else "")


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
