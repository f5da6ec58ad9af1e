"""Names for the placements of a graph, by block: the form in which a plan holds a solution.

A name says the same in every graph of a model's step, whatever the number of its layers: the block,
the phase, and the module and op in it, numbered where a module calls an op several times.

    blocks.3   forward     qkv: addmm
    blocks.3   backward    qkv: mm 2
    blocks.3   parameters  qkv.weight
    (none)     forward     norm: native_layer_norm

A call of no block between calls of a block and of a later one (a residual addition in the loop over
the blocks) is named in the block before it; a "/" tells it from the block's own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.capture.layers.blocks import block_of
from graphaccel.ir.text import target_text
from graphaccel.sharding.placement_text import (
    call_text,
    placement_text,
    read_call,
    read_placement,
    renamed,
)
from graphaccel.sharding.rules.call_values import HELD, Value, placed_calls
from graphaccel.sharding.rules.notation import output_shapes, tensor_arguments
from graphaccel.sharding.rules.shard import Placement, Row
from graphaccel.sharding.rules.solution import Placements

PARAMETERS = "parameters"


class NotPlaced(ValueError):
    """A call or parameter of the graph has no placement, or one that is not of its tensors."""


@dataclass(frozen=True, order=True)
class Name:
    """block: "" outside of all blocks. section: PARAMETERS (and buffers), or a phase. label: unique
    in the section."""

    block: str
    section: str
    label: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.block, self.section, self.label)))


def names_of(graph: fx.Graph, inputs: Sequence[GraphInput]) -> dict[fx.Node, Name]:
    """The names of a graph's inputs and calls. inputs: of its first placeholders."""
    results: dict[fx.Node, Name] = {}
    specs = iter(inputs)
    for node in graph.find_nodes(op="placeholder"):
        spec = next(specs, None)
        if spec is not None and spec.kind in HELD:
            block = block_of(spec.name)
            results[node] = Name(block, PARAMETERS, _inside(spec.name, block))
        else:
            results[node] = Name("", "inputs", node.name)
    seen: Counter[Name] = Counter()
    for node, block in _owned(graph):
        path, op = node.meta.get("module", ""), target_text(node.target).removeprefix("aten.")
        relative = _inside(path, block) if block_of(path) == block else f"/{path}"
        label = f"{relative}: {op}" if relative else op
        name = Name(block, node.meta.get("phase", "forward"), label)
        seen[name] += 1
        count = seen[name]
        results[node] = name if count == 1 else replace(name, label=f"{label} {count}")
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        name = results[node.args[0]]
        results[node] = replace(name, label=f"{name.label} [{node.args[1]}]")
    return results


def written(
    graph: fx.Graph, inputs: Sequence[GraphInput], placements: Placements
) -> dict[Name, str]:
    """The placements of a graph as text, by name."""
    names = names_of(graph, inputs)
    nodes = {node.name: node for node in names}
    kept: dict[fx.Node, dict[int, Placement]] = {}
    for (node, k), place in placements.versions.items():
        kept.setdefault(node, {})[k] = place
    results = {names[node]: placement_text(place) for node, place in placements.held.items()}
    for node, row in placements.rows.items():
        own = renamed(row, lambda by: _reference(names[nodes[by]], names[node]))  # noqa: B023
        results[names[node]] = call_text(own, kept.get(node, {}))
    return results


def read(
    graph: fx.Graph,
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    texts: Mapping[Name, str],
) -> Placements:
    """The placements of a graph from their texts; whether they are possible is not checked here.

    Raises NotPlaced where a parameter or call has none, or one for other tensors; ValueError for a
    text that states no placement.
    """
    names = names_of(graph, inputs)
    nodes = {name: node for node, name in names.items()}
    kinds = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=False))

    def text_of(node: fx.Node) -> str:
        if names[node] not in texts:
            raise NotPlaced(f"{names[node]} has no placement")
        return texts[names[node]]

    held: dict[fx.Node, Placement] = {}
    for node in (n for n, spec in kinds.items() if spec.kind in HELD):
        place = read_placement(text_of(node))
        if place is None:
            raise ValueError(f"{names[node]} has one placement, not any")
        held[node] = place
    rows: dict[fx.Node, Row] = {}
    versions: dict[Value, Placement] = {}
    for node in placed_calls(graph, kinds, outputs):
        row, kept = read_call(text_of(node))
        shapes = output_shapes(node)
        right = len(row.inputs) == len(tensor_arguments(node)) and len(row.outputs) == len(shapes)
        if not right or any(k >= len(shapes) for k in kept):
            raise NotPlaced(f"{names[node]} has a placement of other tensors: {texts[names[node]]}")
        rows[node] = renamed(row, lambda by: _referred(by, names[node], nodes))  # noqa: B023
        versions |= {(node, k): place for k, place in kept.items()}
    return Placements(rows, held, versions, 0.0)


def _owned(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """The calls of a graph, each with the block that its name is in."""
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    own = [block_of(n.meta.get("module", "")) for n in calls]
    phases = [n.meta.get("phase", "forward") for n in calls]
    last = {phase: i for i, (phase, block) in enumerate(zip(phases, own, strict=True)) if block}
    before: dict[str, str] = {}
    for i, (node, phase, block) in enumerate(zip(calls, phases, own, strict=True)):
        if block:
            before[phase] = block
        yield node, block or (before.get(phase, "") if i < last.get(phase, -1) else "")


def _inside(path: str, block: str) -> str:
    """A module path or parameter name relative to its block."""
    return path[len(block) :].removeprefix(".")


def _reference(name: Name, user: Name) -> str:
    """How the placement of a call refers to another call: calls of the same block without it."""
    block = "" if name.block == user.block else f"{name.block}|"
    return f"{block}{name.section} {name.label}"


def _referred(text: str, user: Name, nodes: Mapping[Name, fx.Node]) -> str:
    """The name of the node that a placement of `user` refers to. Raises NotPlaced."""
    block, _, rest = text.rpartition("|")
    section, _, label = rest.partition(" ")
    name = Name(block if "|" in text else user.block, section, label)
    if name not in nodes:
        raise NotPlaced(f"{user} refers to {name}, which the graph does not have")
    return nodes[name].name
