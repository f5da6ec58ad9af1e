"""Partitions a stage's graph into pieces that Inductor compiles and pieces that run as before.

A graph is cut, in its order, into pieces: runs of calls that only compute from tensors, which are
compiled, and the calls between them, which torch runs as before:

    %a = aten.mm(%x, %w)                                   piece 0, compiled
    %b = aten.gelu(%a)
    %sent = _c10d_functional.all_reduce(%b, "sum", 4)      piece 1: messages to other ranks
    %whole = _c10d_functional.wait_tensor(%sent)
    %c = aten.layer_norm(%whole, ...)                      piece 2, compiled
    ...

So no call moves across a message, an in-place write or a random draw, whose order is that of the
graph; and a compiled piece is the same on every rank, whatever the names of its groups.

A piece that spans several identical layers is cut at their ends: pieces with the same `signature`
are compiled once. The cost is that nothing is fused across the end of a layer: the residual add and
the norm after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.compat.torch.ops import is_view, written_arguments
from graphaccel.ir.calls import is_random
from graphaccel.ir.program import StepProgram
from graphaccel.ir.values import tensors_of
from graphaccel.kernels.host_copy import AHEAD, ARRIVED
from graphaccel.sharding.rules.ops.collectives import is_message

IN_PLACE = "write in place"
_FEWEST = 2  # calls that compute: a single one has nothing to fuse with
_LEAST_LAYERS, _LAYER = 4, 8  # least identical layers worth cutting at, and computing calls in one


@dataclass(frozen=True)
class Piece:
    """Consecutive calls. compiled: whether Inductor compiles them. inputs: values from before that
    they read, outputs: values that later calls read, both in the order of the graph."""

    nodes: tuple[fx.Node, ...]
    compiled: bool
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def refusal(node: fx.Node) -> str | None:
    """Why a call is not compiled, as what such calls do ("write in place"), or None."""
    namespace = getattr(node.target, "namespace", None)
    if namespace is None:
        return "are no ops of torch (ONNX Runtime runs them)"
    if is_message(node.target):
        return "send to other ranks"
    if node.target in (AHEAD, ARRIVED):
        return "copy from the host, in the order of the graph"
    if written_arguments(node):
        return IN_PLACE
    if is_random(node):
        return "draw random numbers, in the model's order"
    tensors = tensors_of(node.meta["val"])
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    if any(n.meta.get("chosen") for n in (node, *node.all_input_nodes)):
        return "have sizes that depend on data"
    if any(not isinstance(s, int) for t in tensors for s in t.shape) or any(
        not isinstance(v, (torch.Tensor, tuple, list)) for v in inputs
    ):
        return "have sizes that depend on data"
    if any(t.is_complex() or t.layout != torch.strided for t in tensors):
        return "give complex or sparse tensors"
    return None


def pieces(graph: fx.Graph, *, layers: bool = True) -> tuple[Piece, ...]:
    """The pieces of a graph whose nodes have fake values, in order; possibly none. layers: cut at
    the ends of identical layers too."""
    ordered = list(_ordered(graph))
    written = _written(graph)
    runs: list[tuple[bool, list[fx.Node]]] = []
    refused = {n: n in written or refusal(_maker(n)) is not None for n in ordered}
    for node in ordered:
        if not runs or runs[-1][0] is refused[node]:
            runs.append((not refused[node], []))
        runs[-1][1].append(node)
    joined: list[tuple[bool, list[fx.Node]]] = []
    for compiled, nodes in runs:
        compiled = compiled and sum(map(_computes, nodes)) >= _FEWEST
        if joined and not compiled and not joined[-1][0]:
            joined[-1][1].extend(nodes)
        else:
            joined.append((compiled, nodes))
    order = {n: i for i, n in enumerate(graph.nodes)}
    cut = [
        (compiled, part)
        for compiled, nodes in joined
        for part in (_layers(nodes, order) if compiled and layers else [nodes])
    ]
    return tuple(_piece(compiled, nodes, order) for compiled, nodes in cut)


def signature(piece: Piece) -> Hashable:
    """Equal for pieces that compute the same from inputs of the same metadata: they share one
    compiled code."""
    place: dict[Any, Any] = {n: _Place(i) for i, n in enumerate((*piece.inputs, *piece.nodes))}
    if any(n.op == "get_attr" for n in piece.nodes):  # a constant of its graph
        return piece
    calls = tuple(
        (n.target, repr(map_arg((n.args, dict(n.kwargs)), lambda a: place[a]))) for n in piece.nodes
    )
    given = tuple(_layout(n.meta["val"]) for n in piece.inputs)
    return given, calls, tuple(place[n].number for n in piece.outputs)


@dataclass(frozen=True)
class _Place:
    """Placeholder for a node in a signature."""

    number: int


def _layout(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout, value))
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset()


def _layers(nodes: list[fx.Node], order: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """A compiled run of calls, cut into its layers where enough of them are identical."""
    parts = [list(part) for _, part in groupby(nodes, key=_layer)]
    kinds = [
        signature(_piece(True, part, order))
        if _layer(part[0]) and sum(map(_computes, part)) >= _LAYER
        else None
        for part in parts
    ]
    count = Counter(k for k in kinds if k is not None)
    cut: list[list[fx.Node]] = []
    whole = True  # whether the last part is a complete layer, after which another part begins
    for part, kind in zip(parts, kinds, strict=True):
        layer = kind is not None and count[kind] >= _LEAST_LAYERS
        if layer or whole:
            cut.append(part)
        else:
            cut[-1] = cut[-1] + part
        whole = layer
    return cut


def _layer(node: fx.Node) -> str:
    """The module path up to its first number (transformer.h.3), "" without one."""
    path = str(_maker(node).meta.get("module") or "").split(".")
    numbers = [i for i, name in enumerate(path) if name.isdigit()]
    return ".".join(path[: numbers[0] + 1]) if numbers else ""


def notes(program: StepProgram, *, layers: bool = True, kernels: bool = False) -> tuple[str, ...]:
    """The report's lines about the pieces of all graphs of a step, each graph once. kernels:
    whether the time is that of compiled kernels; the memory then is too where graphs are not cut
    at layers, which a min-cut has rewritten."""
    compiled, count, calls = 0, 0, 0
    unlike: set[Hashable] = set()
    reasons: Counter[str] = Counter()
    for stage in program.stages:
        graphs = [stage.forward, *list(stage.backwards.values())[:1]]
        for graph in (*graphs, *list(stage.weights.values())[:1]):
            result = pieces(graph.graph, layers=layers)
            compiled += sum(p.compiled for p in result)
            unlike.update(signature(p) for p in result if p.compiled)
            for piece in result:
                computing = [n for n in piece.nodes if _computes(n)]
                calls += len(computing)
                count += len(computing) if piece.compiled else 0
                if not piece.compiled:
                    alone = "stand alone between those"
                    reasons.update(refusal(n) or alone for n in computing)
    said = f"Inductor compiles {count} of {calls} calls, in {compiled} pieces"
    said += f" ({len(unlike)} of them unlike)" if len(unlike) < compiled else ""
    if reasons:
        rows = sorted(reasons.items(), key=lambda row: (-row[1], row[0]))
        said += "; torch runs those that " + ", ".join(f"{why} ({n})" for why, n in rows)
    if kernels and not layers:
        return (said,)
    counted = "memory is predicted" if kernels else "time and memory are predicted"
    return said, f"{counted} without Inductor (docs/compile.md says what was measured)"


def _ordered(graph: fx.Graph) -> Iterator[fx.Node]:
    """Calls in order, with the getitems of a tuple right after the call that returns it."""
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr") or node.target is getitem:
            continue
        yield node
        yield from _parts(node)


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target is getitem:
            yield user
            yield from _parts(user)


def _maker(node: fx.Node) -> fx.Node:
    """The call that returns a tuple, for a getitem of it."""
    while node.target is getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not getitem and not is_view(node)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that are views of memory that a call writes to: they must stay views of it."""
    results: set[fx.Node] = set()
    waiting = [a for n in graph.nodes if n.op == "call_function" for a in written_arguments(n)]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in results and is_view(node):
            results.add(node)
            waiting += node.all_input_nodes
    return results


def _piece(compiled: bool, nodes: Sequence[fx.Node], order: dict[fx.Node, int]) -> Piece:
    inside = set(nodes)
    inputs = {n for node in nodes for n in node.all_input_nodes if n not in inside}
    outputs = {n for n in nodes if any(u not in inside for u in n.users)}
    return Piece(
        tuple(nodes),
        compiled,
        tuple(sorted(inputs, key=lambda n: order[n])),
        tuple(sorted(outputs, key=lambda n: order[n])),
    )
