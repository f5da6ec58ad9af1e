"""Compare a graph with the model's numbers as inputs to the one with them as constants."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from graphaccel.capture.batch import ARGUMENTS
from graphaccel.capture.export.export import ForwardGraph
from graphaccel.compat.torch import pytree

_SAME = {"aten::rsub": "aten::sub"}
"""`x - a` and `a - x` are one op with a number, and two with a tensor."""


def same_but_numbers(before: ForwardGraph, now: ForwardGraph, names: Collection[str]) -> bool:
    """Whether both compute the same, except for where the numbers called `names` come from: the
    same ops in the same order, on the same tensors, with results of the same dtypes and shapes; and
    no call reads the value of a number (`item()`).

    A number of the model that no call reads may be a constant in both: the forward may read the
    script's model, as `trainer.model.alpha`, where the copy that is captured has the tensor."""
    left, right = _calls(before, names), _calls(now, names)
    if any(name not in _read(now) for name in names if not name.startswith(ARGUMENTS)):
        return False
    if left is None or right is None or len(left[0]) != len(right[0]):
        return False
    places = left[1], right[1]
    if any(_known(a) != _known(b) for a, b in zip(before.inputs, now.inputs, strict=False)):
        return False
    return all(_same_node(a, b, *places) for a, b in zip(left[0], right[0], strict=True))


def _read(forward: ForwardGraph) -> set[str]:
    """The inputs that a call reads."""
    places = forward.graph.graph.find_nodes(op="placeholder")
    pairs = zip(places, forward.inputs, strict=True)
    return {spec.name for place, spec in pairs if place.users}


def _known(spec: Any) -> tuple[str, str]:
    return spec.kind, spec.name


def _calls(
    forward: ForwardGraph, names: Collection[str]
) -> tuple[list[fx.Node], dict[fx.Node, int]] | None:
    """The nodes that do not compute only with numbers, and the position of each; that of a number
    is -1. None where a value is read."""
    places: dict[fx.Node, int] = {}
    calls = []
    inputs = iter(forward.inputs)
    for node in forward.graph.graph.nodes:
        if isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymBool, torch.SymInt)):
            return None
        if node.op == "placeholder":
            number = _known(next(inputs)) in {("batch", n) for n in names}
        else:
            read = node.all_input_nodes
            number = bool(read) and node.op != "output" and all(places[n] < 0 for n in read)
        places[node] = -1 if number else len(calls)
        if not number:
            calls.append(node)
    return calls, places


def _same_node(
    left: fx.Node, right: fx.Node, lefts: dict[fx.Node, int], rights: dict[fx.Node, int]
) -> bool:
    if left.op != right.op or _op(left) != _op(right) or _results(left) != _results(right):
        return False
    own, other = _arguments(left), _arguments(right)
    if _op(left) == "aten::sub" and own and own[0] is not None and _reversed(left, right):
        own = own[::-1]
    if len(own) != len(other):
        return False
    for a, b in zip(own, other, strict=True):
        if isinstance(b, fx.Node) and rights[b] < 0:
            if isinstance(a, fx.Node) and lefts[a] >= 0:
                return False
        elif isinstance(a, fx.Node) or isinstance(b, fx.Node):
            if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or lefts[a] != rights[b]:
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True


def _reversed(left: fx.Node, right: fx.Node) -> bool:
    return ("rsub" in str(left.target)) != ("rsub" in str(right.target))


def _op(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    name = str(node.target) if schema is None else schema.name
    return _SAME.get(name, name) if node.op == "call_function" else ""


def _arguments(node: fx.Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs))


def _results(node: fx.Node) -> list[Any]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return [(v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else v for v in values]
