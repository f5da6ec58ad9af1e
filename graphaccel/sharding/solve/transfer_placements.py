"""Copy placements from a solved graph to one with a layer less or more.

Of the graphs that represent a deep model (`ir.replication.repeat`) one of the longer ones is
solved: the optimum differs with the depth where layers are few, and the longer graph is nearer to
the deep model. The others copy its placements only where the correspondence is unambiguous: each of
their calls has a counterpart, on tensors of the same sizes, and reads values in the placements that
its counterpart reads. `ir.replication.repeat` then proves that the sharded graphs differ by one
layer, as it does where all were solved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from graphaccel.capture.export.export import GraphInput
from graphaccel.ir.replication.layers import Run
from graphaccel.sharding.rules.call_values import source_of
from graphaccel.sharding.rules.notation import output_shapes, tensor_arguments
from graphaccel.sharding.rules.shard import Shard
from graphaccel.sharding.rules.solution import Placements


def transferred_placements(
    known: Placements,
    placed: fx.Graph,
    placed_inputs: Sequence[GraphInput],
    graph: fx.Graph,
    inputs: Sequence[GraphInput],
    run: Run,
    more: int,
) -> Placements | None:
    """Placements of `graph`, where `placed` has `more` layers (1 or -1) of `run`; None where the
    correspondence is ambiguous. run: as numbered in both."""
    counterparts = _matching(placed, placed_inputs, graph, inputs, run, more)
    if counterparts is None or known.guessed:
        return None
    rows = {
        node: known.rows[counterpart]
        for node, counterpart in counterparts.items()
        if counterpart in known.rows
    }
    if any(isinstance(p, Shard) and p.by for r in rows.values() for p in (*r.inputs, *r.outputs)):
        return None  # by a name that the other graph does not have
    several = {node for node, _ in known.versions}
    versions = {}
    for node, counterpart in counterparts.items():
        for k in range(len(output_shapes(node)) if counterpart in several else 0):
            if (counterpart, k) in known.versions:
                versions[node, k] = known.versions[counterpart, k]
    held = {
        node: known.held[counterpart]
        for node, counterpart in counterparts.items()
        if counterpart in known.held
    }
    placements = Placements(rows, held, versions, known.seconds)
    for node, counterpart in counterparts.items():
        if node.op != "call_function":
            continue
        read, theirs = tensor_arguments(node), tensor_arguments(counterpart)
        if len(read) != len(theirs):
            return None
        for one, other in zip(read, theirs, strict=True):
            if one.meta["val"].shape != other.meta["val"].shape:
                return None
            own, its = source_of(one), source_of(other)
            if placements.of(own) != known.of(its) or versions.get(own) != known.versions.get(its):
                return None
    return placements


def _matching(
    placed: fx.Graph,
    placed_inputs: Sequence[GraphInput],
    graph: fx.Graph,
    inputs: Sequence[GraphInput],
    run: Run,
    more: int,
) -> dict[fx.Node, fx.Node] | None:
    """Node → its counterpart. An added middle layer copies the first; a removed one is unused."""
    theirs = _by_module(placed, placed_inputs)
    results: dict[fx.Node, fx.Node] = {}
    for (phase, path), nodes in _by_module(graph, inputs).items():
        number = run.number(path)
        live = path if number is None or number < 2 else run.entry(path, number + more)
        same = theirs.get((phase, live), [])
        if [n.target for n in nodes if n.op != "placeholder"] != [
            n.target for n in same if n.op != "placeholder"
        ] or len(nodes) != len(same):
            return None
        results |= zip(nodes, same, strict=True)
    return results


def _by_module(
    graph: fx.Graph, inputs: Sequence[GraphInput]
) -> dict[tuple[str, str], list[fx.Node]]:
    """(phase, module path) → its nodes in order; inputs by their names."""
    results: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)
    names = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            spec = next(names, None)
            results["input", spec.name if spec is not None else node.name].append(node)
        elif node.op != "output":
            path = node.meta.get("module", "")
            results[node.meta.get("phase", "forward"), path].append(node)
    return results
