"""Build the captured graphs of many identical layers from captures of few layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from graphaccel.capture.export.export import ForwardGraph, GraphInput, GraphOutput
from graphaccel.capture.layers.blocks import Block
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.ir.replication.layers import Layered, NotRepeated, Run, copies
from graphaccel.ir.replication.repeat import Pattern
from graphaccel.ir.replication.unfold import Unfolded

Joint = tuple[fx.GraphModule, tuple[GraphInput, ...], tuple[GraphOutput, ...]]


def layered(
    graph: fx.GraphModule, inputs: Sequence[GraphInput], outputs: Sequence[GraphOutput]
) -> Layered:
    """A captured graph with the layer names of its inputs and results."""
    return Layered(
        graph.graph,
        tuple(spec.name.removeprefix(_prefix(spec)) for spec in inputs),
        tuple(spec.name if spec.kind in ("gradient", "buffer") else "" for spec in outputs),
        tuple((spec.kind, spec.leaf, spec.tracked) for spec in inputs),
        tuple((spec.kind, spec.leaf) for spec in outputs),
    )


def _layered(forward: ForwardGraph) -> Layered:
    """Likewise, with the values of constants: those that differ between layers are detected."""
    plain = layered(forward.graph, forward.inputs, forward.outputs)
    kinds = tuple(
        (kind, _value(forward.constants[spec.name]) if spec.kind == "constant" else None)
        for kind, spec in zip(plain.input_kinds, forward.inputs, strict=True)
    )
    return replace(plain, input_kinds=kinds)


def _value(constant: torch.Tensor) -> object:
    """Its bytes: NaN equals itself, and zero has a sign."""
    if isinstance(constant, FakeTensor):
        return None
    flat = constant.detach().contiguous().flatten()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def _prefix(spec: GraphInput) -> str:
    """The prefix of constants, which are named after their module as seen from outside the
    model."""
    return "model." if spec.kind == "constant" and spec.name.startswith("model.") else ""


def repeated_forward(
    runs: Sequence[Run], short: ForwardGraph, longer: Sequence[ForwardGraph]
) -> ForwardGraph:
    """The forward graph of all layers. Raises NotRepeated."""
    for other in longer:
        if other.returned != short.returned:
            raise NotRepeated("what the model returns depends on the number of layers")
    pattern = Pattern(runs, _layered(short), [_layered(f) for f in longer])
    unfolded = Unfolded(pattern)
    inputs = input_specs(unfolded, short.inputs)
    constants = {
        spec.name: short.constants[short.inputs[i].name]
        for (i, _), spec in zip(unfolded.inputs, inputs, strict=True)
        if spec.kind == "constant"
    }
    return replace(
        short,
        graph=unfolded.module(short.graph),
        inputs=inputs,
        outputs=_outputs(unfolded, short.outputs),
        constants=constants,
        attributes=_attributes(runs, short, unfolded, inputs),
    )


def _attributes(
    runs: Sequence[Run], short: ForwardGraph, unfolded: Unfolded, inputs: Sequence[GraphInput]
) -> dict[str, str]:
    """Where the model of all layers holds the constants. Raises NotRepeated where the place in some
    layer differs from what the name implies."""
    results = {}
    for (i, _), spec in zip(unfolded.inputs, inputs, strict=True):
        own = short.inputs[i]
        path = short.attributes.get(own.name) if spec.kind == "constant" else None
        if path is None:
            continue
        if path == own.name.removeprefix("model."):
            path = spec.name.removeprefix("model.")
        elif any(run.number(path) is not None for run in runs):
            raise NotRepeated(f"{path} is a constant of a layer without a name of its own")
        results[spec.name] = path
    return results


def repeated_sizes(
    runs: Sequence[Run],
    short: ForwardGraph,
    longer: Sequence[ForwardGraph],
    others: Sequence[ForwardGraph],
) -> list[ForwardGraph]:
    """The forward graphs of all layers at other sizes. others: of few layers.

    Raises NotRepeated."""
    pattern = Pattern(runs, _layered(short), [_layered(f) for f in longer])
    results = []
    for other in others:
        unfolded = Unfolded(pattern.at(_layered(other)))
        inputs = input_specs(unfolded, other.inputs)
        graph = unfolded.module(other.graph)
        outputs = _outputs(unfolded, other.outputs)
        results.append(replace(other, graph=graph, inputs=inputs, outputs=outputs))
    return results


def repeated_joint(runs: Sequence[Run], short: Joint, longer: Sequence[Joint]) -> Joint:
    """Graph, inputs and outputs of all layers; nodes of `longer` get the size expressions of
    `short`. Raises NotRepeated."""
    pattern = Pattern(runs, layered(*short), [layered(*each) for each in longer])
    pattern.copy_metadata("dims", "sizes")
    unfolded = Unfolded(pattern)
    return (
        unfolded.module(short[0]),
        input_specs(unfolded, short[1]),
        _outputs(unfolded, short[2]),
    )


def _outputs(unfolded: Unfolded, short: Sequence[GraphOutput]) -> tuple[GraphOutput, ...]:
    return tuple(replace(short[i], name=name or short[i].name) for i, name in unfolded.outputs)


def input_specs(unfolded: Unfolded, short: Sequence[GraphInput]) -> tuple[GraphInput, ...]:
    """The specs of the repeated graph's placeholders."""
    return tuple(
        replace(short[i], name=_prefix(short[i]) + name)
        for i, name in unfolded.inputs
        if i < len(short)
    )


def repeated_blocks(runs: Sequence[Run], short: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks of all layers, in the order they first compute something."""
    return tuple(replace(b, name=name) for b in short for name in copies(runs, b.name))
