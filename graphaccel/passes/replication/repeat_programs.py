"""Build the stage programs of all layers from rewritten programs of a few layers.

Consecutive layers that the plan treats identically form a row, and each row is repeated: those of
one stage, recomputed or not. A layer within or after which a stage ends is in no row.

before (of 5 layers, and of 6)                   after (126 layers)
  %all: = all_gather(%shards_2)   # layers.1       %all: = all_gather(%shards_2)    # layers.1
  %y: = aten.mm(%x, %w)           # layers.1       %y: = aten.mm(%x, %w)            # layers.1
                                                   %all_1: = all_gather(%shards_3)  # layers.2
                                                   %y_1: = aten.mm(%y, %w_1)        # layers.2
                                                   ...

Like `repeat_layers`, but later in the pipeline: what the passes in between decide for a layer holds
for all copies as well. The same proof applies to each graph of the program
(`ir.replication.repeat`). The programs have more layers, because a layer gathers and reduces for
its neighbours, and waits for the sums over other axes of the layer after the next: the layer that
is copied has only neighbours of its own row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.replication.layers import Layered, NotRepeated, Run, copies
from graphaccel.ir.replication.repeat import Pattern
from graphaccel.ir.replication.unfold import Unfolded
from graphaccel.ir.values import keep_shares, returned

_PLACED = ("parameter", "buffer", "constant", "held")  # their placeholders are named after them
_LAID = (*_PLACED, "shards", "carried", "gradient", "shard", "accumulator")  # so are these values
_WHOLE = "whole "  # a gathered parameter that is saved for the backward

LAYERS = 5
"""Layers of a row in the shortest of the programs."""

_TRAVELS = ("saved", "sent", "received")  # kinds of values that are named after nodes


def rows_of(
    runs: Sequence[Run],
    treated: Mapping[str, object],
    ends: Mapping[Run, Sequence[int]] | None = None,
) -> tuple[Run, ...]:
    """Rows of more than `LAYERS` layers of one stage that are treated identically.

    treated: block → how, where that is not the default. ends: of runs, the layers within or after
    which a stage ends, ascending."""
    rows = []
    for run in runs:
        start, last = 0, (ends or {}).get(run, ())
        how = [
            (treated.get(block_of(run.layer(n))), bisect_left(last, n), n in last)
            for n in range(run.count)
        ]
        for _, row in groupby(how):
            count = len(list(row))
            if count > LAYERS:
                rows.append(Run(run.path, run.first + start, count))
            start += count
    return tuple(rows)


def repeat_programs(
    step: StepGraph, rows: Sequence[Run], programs: Sequence[StageProgram]
) -> StageProgram:
    """The program of all layers. rows: of identical layers. programs: of a stage with `LAYERS`
    layers in each row; then, for each row, with one more layer in it.

    Copies of a node share its value. Raises NotRepeated where the passes did not do the same for
    one more layer.
    """
    short = programs[0]
    if any(set(p.backwards) != set(short.backwards) for p in programs):
        raise NotRepeated("the moments of a step depend on the number of layers")
    forward = _repeated(rows, [_forward(p) for p in programs])
    outputs = _outputs(short.forward_outputs, forward)
    backwards = {
        moment: _repeated(rows, [_backward(p, moment) for p in programs])
        for moment in short.backwards
    }
    ends_of = {
        (_inputs(short.backward_inputs, built), _outputs(short.backward_outputs, built))
        for built in backwards.values()
    }
    if len(ends_of) > 1:
        raise NotRepeated("the moments of a step have other inputs with more layers")
    ends = ends_of.pop() if ends_of else ((), ())
    saved = {value.name for value in outputs if value.kind == "saved"}
    if not saved >= {value.name for value in ends[0] if value.kind == "saved"}:
        raise NotRepeated("what a backward reads is not what its forward saves")
    if short.prepare is not None:
        before = _repeated(rows, [_prepare(p) for p in programs])
        short = replace(
            short,
            prepare=before.module(short.prepare),
            prepare_inputs=_inputs(short.prepare_inputs, before),
            prepare_outputs=_outputs(short.prepare_outputs, before),
        )
    held = {
        name for few in (*short.parameters, *short.buffers) for name in copies(rows, few, LAYERS)
    }
    return replace(
        short,
        forward=forward.module(short.forward),
        forward_inputs=_inputs(short.forward_inputs, forward),
        forward_outputs=outputs,
        backwards={
            moment: built.module(short.backwards[moment]) for moment, built in backwards.items()
        },
        backward_inputs=ends[0],
        backward_outputs=ends[1],
        parameters=tuple(s.name for s in step.inputs if s.kind == "parameter" and s.name in held),
        buffers=tuple(s.name for s in step.inputs if s.kind == "buffer" and s.name in held),
        groups=_groups(rows, short.groups),
        reduced=_groups(rows, short.reduced),
    )


def check_messages(programs: Iterable[StageProgram]) -> None:
    """Raises NotRepeated unless stages receive exactly what is sent to them, by name."""
    sent: set[tuple[int, int, str]] = set()
    received: set[tuple[int, int, str]] = set()
    for program in programs:
        for value in (*program.forward_outputs, *program.backward_outputs):
            if value.kind == "sent":
                sent.update((program.stage, peer, value.name) for peer in value.peers)
        for value in (*program.forward_inputs, *program.backward_inputs):
            if value.kind == "received":
                received.update((peer, program.stage, value.name) for peer in value.peers)
    if sent != received:
        raise NotRepeated("what a stage sends is not what others receive")


def _repeated(rows: Sequence[Run], graphs: Sequence[Layered]) -> Unfolded:
    keep_shares(graphs[0].graph)
    return Unfolded(Pattern(rows, graphs[0], graphs[1:], LAYERS))


def _forward(program: StageProgram) -> Layered:
    return _layered(program.forward, program.forward_inputs, program.forward_outputs)


def _backward(program: StageProgram, moment: tuple[bool, bool]) -> Layered:
    graph = program.backwards[moment]
    return _layered(graph, program.backward_inputs, program.backward_outputs)


def _prepare(program: StageProgram) -> Layered:
    assert program.prepare is not None
    return _layered(program.prepare, program.prepare_inputs, program.prepare_outputs)


def _layered(graph: fx.GraphModule, inputs: Sequence[Value], outputs: Sequence[Value]) -> Layered:
    places = graph.graph.find_nodes(op="placeholder")
    return Layered(
        graph.graph,
        tuple(_path(v, n) for v, n in zip(inputs, places, strict=True)),
        tuple(_path(v, n) for v, n in zip(outputs, returned(graph), strict=True)),
        tuple(_kind(v) for v in inputs),
        tuple(_kind(v) for v in outputs),
        tuple(v.kind not in _PLACED and not v.name.startswith(_WHOLE) for v in inputs),
        frozenset(_kind(v) for v in (*inputs, *outputs) if v.kind == "carried"),
        tuple(map(_travelling, inputs)),
        tuple(map(_travelling, outputs)),
    )


def _kind(value: Value) -> object:
    return value.kind, value.leaf, value.batch_dim, value.peers


def _path(value: Value, node: fx.Node) -> str:
    """The module or parameter from which the layer of a value is read."""
    if value.kind in _LAID:
        return value.name.removeprefix(_around(value))
    if value.kind == "saved" and value.name.startswith(_WHOLE):
        return value.name.removeprefix(_WHOLE)
    return node.meta.get("module", "") if value.kind in _TRAVELS else ""


def _around(value: Value) -> str:
    """The prefix of constants: they are named after their module as seen from outside the model."""
    return "model." if value.kind == "constant" and value.name.startswith("model.") else ""


def _travelling(value: Value) -> str:
    """The name of a value that is passed to another graph, if it is named after a node."""
    named = value.kind in _TRAVELS and not value.name.startswith(_WHOLE)
    return value.name if named else ""


def _inputs(short: Sequence[Value], unfolded: Unfolded) -> tuple[Value, ...]:
    pairs = zip(unfolded.inputs, unfolded.input_values, strict=True)
    return tuple(_value(short[i], path, name) for (i, path), name in pairs)


def _outputs(short: Sequence[Value], unfolded: Unfolded) -> tuple[Value, ...]:
    pairs = zip(unfolded.outputs, unfolded.output_values, strict=True)
    return tuple(_value(short[i], path, name) for (i, path), name in pairs)


def _value(value: Value, path: str, name: str) -> Value:
    if value.kind in _LAID:
        return replace(value, name=_around(value) + path)
    if value.kind == "saved" and value.name.startswith(_WHOLE):
        return replace(value, name=_WHOLE + path)
    return replace(value, name=name) if name else value


def _groups(rows: Sequence[Run], groups: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Groups of parameters of few layers, extended to all of them, layer by layer."""
    results: list[tuple[str, ...]] = []
    for _, row in groupby(
        groups, lambda group: [len(copies(rows, name, LAYERS)) for name in group][:1]
    ):
        named = [[copies(rows, name, LAYERS) for name in group] for group in row]
        if len({len(names) for group in named for names in group}) > 1:
            raise NotRepeated("a group of parameters belongs to several layers")
        for copy in range(len(named[0][0])):
            results += [tuple(names[copy] for names in group) for group in named]
    return tuple(results)
