"""The joint graph of one rank: how it is sharded over the axes so far, and over one more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from graphaccel.capture.export.export import GraphInput
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.fakes import Fakes
from graphaccel.ir.program import Sharded
from graphaccel.ir.replicated import replicated
from graphaccel.sharding.apply.shard_axis import shard_axis
from graphaccel.sharding.rules.solution import Placements

AXES = ("context", "tensor", "expert")
"""The axes that shard the graph, in the order in which they do. Context comes first: what tensor
then splits along the sequence is a device's own range of it. The other way round a device would
have a piece of the range of each tensor rank, and every gather along the sequence would have to
reorder."""


@dataclass(frozen=True)
class LocalGraph:
    """graph: of one rank. parameter_shards: parameter → splits, in the order in which they are
    applied. partial: parameter → axes over which its gradient is a partial sum."""

    graph: fx.GraphModule = field(repr=False)
    parameter_shards: Mapping[str, tuple[Sharded, ...]] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def over_axis(
    before: LocalGraph,
    step: StepGraph,
    placements: Placements,
    *,
    axis: str,
    ranks: int,
    keep_outputs: bool,
    fakes: Fakes | None = None,
) -> LocalGraph:
    """The graph sharded over one more axis (`sharding.apply.shard_axis`)."""
    built = shard_axis(
        before.graph, step.inputs, step.outputs, placements, axis=axis, ranks=ranks,
        keep_outputs=keep_outputs, fakes=fakes,
    )  # fmt: skip
    parameter_shards, partial = dict(before.parameter_shards), dict(before.partial)
    for name, shard in built.held.items():
        parameter_shards[name] = (
            *parameter_shards.get(name, ()),
            Sharded(axis, shard.dim, shard.outer),
        )
    for name in sorted(built.partial):
        partial[name] = (*partial.get(name, ()), axis)
    return LocalGraph(built.graph, parameter_shards, partial)


def mark_replicated(local: LocalGraph, inputs: Sequence[GraphInput]) -> None:
    """Set meta "replicated" of each call: whether its result is the same on all ranks of the tensor
    axis."""
    graph = local.graph.graph
    split = {
        node
        for node, spec in zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
        if any(s.axis == "tensor" for s in local.parameter_shards.get(spec.name, ()))
    }
    same = replicated(graph, "tensor", split)
    for node in graph.nodes:
        node.meta["replicated"] = node in same
