"""Assign every node of the joint graph to a pipeline stage; a cut may fall after any node.

A cut falls after a node of the forward graph, not between modules. The stage of a forward value is
the stage of the forward-graph node it computes; a backward value is on the stage of the values it
is the derivative of, but never on a later one than the gradients it is computed from: gradients
flow down the stages; what the backward computes from parameters alone is where it is read. What
runs once on the whole batch (`sharding.rules.head`) is on the last stage. Values that depend on no
parameter (masks, positions, rotary tables) are recomputed on every stage that reads them;
everything else that crosses is sent once, from the stage that computes it to each that reads it,
neighbour or not (an encoder's output to every decoder stage).

The gradient of a parameter that several stages use is one partial gradient per stage: each
accumulates its own, and they are summed once a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.errors import BadPin, Unsupported
from graphaccel.ir.calls import is_random
from graphaccel.ir.values import returned
from graphaccel.sharding.rules.ops.collectives import is_message

aten = torch.ops.aten


@dataclass(frozen=True)
class StagedGraph:
    """A joint graph and the stage of every node.

    stage: node → stage. free: nodes that every stage computes itself where it needs them.
    gradients: parameter name → (stage, node) of each partial gradient.
    homes: parameter or buffer name → the stages that hold it, in order.
    """

    graph: fx.GraphModule = field(repr=False)
    stages: int
    stage: dict[fx.Node, int] = field(repr=False)
    free: frozenset[fx.Node] = field(repr=False)
    gradients: dict[str, tuple[tuple[int, fx.Node], ...]] = field(repr=False)
    homes: Mapping[str, tuple[int, ...]] = field(repr=False)


def cut_stages(
    graph: fx.GraphModule,
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    positions: dict[str, int],
    cuts: Sequence[str],
    homes: Mapping[str, tuple[int, ...]] | None = None,
    everywhere: Collection[str] = (),
) -> StagedGraph:
    """Assign a stage to every node.

    positions: forward-graph node name → its place in the forward graph. cuts: names after which a
    stage ends. homes: stages that already hold the parameters (for the graphs of evaluation, and of
    calls with other flags): then a node is on the last stage of what it reads, and `cuts` is
    ignored. everywhere: buffers that all stages hold, for what is computed once a step.

    Raises BadPin (GA202) for cuts between rows that were sent to their experts and what reads them,
    Unsupported (GA208) for a call that reads a parameter on a stage that does not hold it.
    """
    count = len(cuts) + 1
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    kinds = {n: spec for n, spec in zip(placeholders, inputs, strict=False)}
    free = _free_nodes(graph, kinds)
    weights = _of_weights(graph, kinds)
    if homes is None:
        behind = {n for n in weights if n.meta.get("phase") == "backward"}
        ends = sorted(positions[name] for name in cuts)
        stage = _with_weights(graph, _by_position(graph, positions, ends, free, behind), behind)
    else:
        count = 1 + max((s for held in homes.values() for s in held), default=0)
        placed = _by_parameters(graph, homes, free, weights)
        _check_homes(placed, homes, weights)
        stage = _with_weights(graph, placed, weights)
    _check_rows(stage, cuts)
    gradients = _gradients(graph, outputs, stage)
    _drop_sums(graph, outputs, gradients, stage)
    if homes is None:
        homes = _homes(graph, kinds, outputs, stage, gradients) | dict.fromkeys(
            everywhere, tuple(range(count))
        )
    return StagedGraph(graph, count, stage, free, gradients, homes)


def _check_homes(
    stage: Mapping[fx.Node, int],
    homes: Mapping[str, tuple[int, ...]],
    weights: Mapping[fx.Node, tuple[str, ...]],
) -> None:
    """A parameter is where the planned step read it; one that it did not read is on the first
    stage."""
    for node, own in stage.items():
        for source in node.all_input_nodes:
            for name in weights.get(source, ()):
                if own not in homes.get(name, (own,)):
                    raise Unsupported(
                        what=f"a step that reads `{name}` on stage {own} of the pipeline",
                        reason=f"the plan holds it on stage {homes[name][0]}, by what the step "
                        "that was planned for reads, and in which order",
                        help_line="plan for a step that reads every parameter:  "
                        "graphaccel.optimize(model, optimizer, example_batch=batch)",
                        other_help="or leave the model whole:  pipeline=1",
                    )


def _check_rows(stage: Mapping[fx.Node, int], cuts: Sequence[str]) -> None:
    """Values sent between stages must have sizes that are known in advance."""
    for node, own in stage.items():
        if node.meta.get("chosen") and any(stage.get(user, own) != own for user in node.users):
            module = node.meta.get("module", "")
            reason = f"one falls inside {module}, where rows are with the experts they chose"
            raise BadPin(pin="cuts", value=tuple(cuts), reason=reason)


def _free_nodes(graph: fx.GraphModule, kinds: dict[fx.Node, GraphInput]) -> frozenset[fx.Node]:
    """Values computed from the batch, constants and the prologue alone, without random numbers."""
    bound: set[fx.Node] = {
        n for n, spec in kinds.items() if spec.kind in ("parameter", "buffer", "tangent")
    }
    free = set()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if (
            is_random(node)
            or is_message(node.target)
            or any(n in bound for n in node.all_input_nodes)
        ):
            bound.add(node)
        else:
            free.add(node)
    return frozenset(free)


def _of_weights(
    graph: fx.GraphModule, kinds: dict[fx.Node, GraphInput]
) -> dict[fx.Node, tuple[str, ...]]:
    """Parameters, buffers and values computed from them alone (casts, transposes) → their names."""
    results: dict[fx.Node, tuple[str, ...]] = {
        n: (spec.name,) for n, spec in kinds.items() if spec.kind in ("parameter", "buffer")
    }
    for node in graph.graph.nodes:
        reads = node.all_input_nodes
        if node.op != "call_function" or not reads or is_random(node) or "head" in node.meta:
            continue
        if all(n in results for n in reads):
            results[node] = tuple(name for n in reads for name in results[n])
    return results


def _with_weights(
    graph: fx.GraphModule, stage: Mapping[fx.Node, int], weights: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """Values of `_of_weights` are on the stage that reads them, whatever stage the forward had them
    on, and no other node follows them."""
    results = dict(stage)
    for node in reversed(graph.graph.nodes):
        if node.op == "call_function" and node in weights:
            ahead = node.meta["phase"] == "forward"
            own = {results[u] for u in node.users if u in results} or {0}
            results[node] = min(own) if ahead else max(own)
    return {n: results[n] for n in graph.graph.nodes if n in results}


def _by_position(
    graph: fx.GraphModule,
    positions: dict[str, int],
    ends: list[int],
    free: frozenset[fx.Node],
    weights: Collection[fx.Node],
) -> dict[fx.Node, int]:
    """Stages of all nodes that are neither free nor computed from weights alone."""
    last = len(ends)
    stage: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in free or node in weights:
            continue
        if "head" in node.meta:
            stage[node] = last
            continue
        place = positions.get(node.meta.get("origin", ""))
        own = last if place is None else sum(place > end for end in ends)
        reads = [n for n in node.all_input_nodes if n in stage]
        if node.meta["phase"] == "forward":
            stage[node] = max([own, *(stage[n] for n in reads)])
        else:
            above = [stage[n] for n in reads if n.meta["phase"] == "backward"]
            stage[node] = min([own, *above])
    return stage


def _by_parameters(
    graph: fx.GraphModule,
    homes: Mapping[str, tuple[int, ...]],
    free: frozenset[fx.Node],
    weights: Mapping[fx.Node, tuple[str, ...]],
) -> dict[fx.Node, int]:
    """A forward node is on the stage of its parameters, no earlier than its inputs; a backward node
    on that of the node it is the derivative of, as in `_by_position`."""
    stage: dict[fx.Node, int] = {}
    origins: dict[str, int] = {}
    last = max((s for held in homes.values() for s in held), default=0)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in free or node in weights:
            continue
        if "head" in node.meta:
            stage[node] = last
            continue
        reads = [n for n in node.all_input_nodes if n in stage]
        origin = node.meta.get("origin", "")
        if node.meta.get("phase") == "backward":
            above = [stage[n] for n in reads if n.meta["phase"] == "backward"]
            stage[node] = min([origins.get(origin, last), *above])
            continue
        reached = max((stage[n] for n in reads), default=0)
        for source in node.all_input_nodes:
            for name in weights.get(source, ()):
                if name in homes:
                    held = homes[name]
                    reached = min((s for s in held if s >= reached), default=max(reached, held[-1]))
        stage[node] = reached
        origins[origin] = max(reached, origins.get(origin, 0))
    return stage


def _gradients(
    graph: fx.GraphModule, outputs: Sequence[GraphOutput], stage: dict[fx.Node, int]
) -> dict[str, tuple[tuple[int, fx.Node], ...]]:
    results = {}
    for node, spec in zip(returned(graph), outputs, strict=True):
        if spec.kind == "gradient":
            results[spec.name] = _unsummed(node, stage)
    return results


def _drop_sums(
    graph: fx.GraphModule,
    outputs: Sequence[GraphOutput],
    gradients: dict[str, tuple[tuple[int, fx.Node], ...]],
    stage: dict[fx.Node, int],
) -> None:
    """Remove sums that were split into terms: nothing may be sent for them."""
    result = graph.graph.output_node()
    firsts = [
        gradients[spec.name][0][1] if spec.kind == "gradient" else node
        for node, spec in zip(returned(graph), outputs, strict=True)
    ]
    others = [node for terms in gradients.values() for _, node in terms[1:]]
    result.args = ([*firsts, *others],)
    graph.graph.eliminate_dead_code()
    alive = set(graph.graph.nodes)
    for node in [n for n in stage if n not in alive]:
        del stage[node]


def _unsummed(node: fx.Node, stage: dict[fx.Node, int]) -> tuple[tuple[int, fx.Node], ...]:
    """The terms of a gradient, one sum a stage: a sum over stages is split into its terms."""
    terms: dict[int, list[fx.Node]] = defaultdict(list)
    stack = [node]
    while stack:
        current = stack.pop()
        parts = [n for n in current.all_input_nodes if n in stage]
        crosses = len({stage[p] for p in parts}) > 1
        if current.target is aten.add.Tensor and not current.kwargs and crosses:
            stack += parts
        else:
            terms[stage.get(current, 0)].append(current)
    result = []
    for where, nodes in sorted(terms.items()):
        total = nodes[0]
        for other in nodes[1:]:
            with total.graph.inserting_after(max(total, other)):
                added = total.graph.call_function(aten.add.Tensor, (total, other))
            kept = {key: value for key, value in total.meta.items() if key != "bind"}
            added.meta = {**kept, "made_by": "cut_stages"}
            stage[added] = where
            total = added
        result.append((where, total))
    return tuple(result)


def _homes(
    graph: fx.GraphModule,
    kinds: dict[fx.Node, GraphInput],
    outputs: Sequence[GraphOutput],
    stage: dict[fx.Node, int],
    gradients: dict[str, tuple[tuple[int, fx.Node], ...]],
) -> dict[str, tuple[int, ...]]:
    """The stages where a parameter is read or gets a gradient, and a buffer is read or gets its new
    value."""
    held: dict[str, set[int]] = defaultdict(set)
    last = max(stage.values(), default=0)
    for node, spec in zip(returned(graph), outputs, strict=False):
        if spec.kind == "buffer":
            held[spec.name].add(stage.get(node, last))
    for node, spec in kinds.items():
        if spec.kind not in ("parameter", "buffer"):
            continue
        held[spec.name].update(stage[u] for u in node.users if u in stage)
        held[spec.name].update(s for s, _ in gradients.get(spec.name, ()))
        if not held[spec.name]:
            held[spec.name].add(0)  # unused: some stage must hold it
    return {name: tuple(sorted(stages)) for name, stages in held.items()}
