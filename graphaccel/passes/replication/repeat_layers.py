"""Build the joint graph of all layers from rewritten graphs of a few, by repeating one layer.

before (of 3 layers, and of 4)                   after (126 layers)
  %y: = aten.mm(%x, %w)          # layers.1        %y: = aten.mm(%x, %w)          # layers.1
  %all: = all_reduce(%y)         # layers.1        %all: = all_reduce(%y)         # layers.1
                                                   %y_1: = aten.mm(%all, %w_1)    # layers.2
                                                   %all_1: = all_reduce(%y_1)     # layers.2
                                                   ...

What a rewrite decides for the middle layer holds for all copies (`ir.replication.repeat`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from graphaccel.capture.layers.replicate import layered
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.replication.repeat import Pattern
from graphaccel.ir.replication.unfold import Unfolded

T = TypeVar("T")


@dataclass(frozen=True)
class RepeatedGraph:
    """graph: of all layers. inputs: name of each of its inputs → its name among few layers.
    outputs: for each output, its index among the outputs of few layers."""

    graph: fx.GraphModule = field(repr=False)
    inputs: Mapping[str, str]
    outputs: tuple[int, ...]

    def spread(self, known: Mapping[str, T]) -> dict[str, T]:
        """Facts about the inputs of few layers, extended to the inputs of all of them."""
        return {name: known[few] for name, few in self.inputs.items() if few in known}


def repeat_layers(step: StepGraph, rewritten: Sequence[fx.GraphModule]) -> RepeatedGraph:
    """The joint graph of all layers. rewritten: those of the few layers in `step.repeats`, the
    short one first, with their inputs and outputs in the same order.

    Raises NotRepeated where the rewrite did not do the same for one more layer.
    """
    few = step.repeats
    assert few is not None
    short, *longer = (
        layered(graph, each.inputs, each.outputs)
        for graph, each in zip(rewritten, (few.short, *few.longer), strict=True)
    )
    unfolded = Unfolded(Pattern(few.runs, short, longer))
    names = [spec.name for spec in few.short.inputs]
    pairs = zip(step.inputs, unfolded.inputs, strict=False)  # values of the prologue are at the end
    return RepeatedGraph(
        unfolded.module(rewritten[0]),
        {spec.name: names[i] for spec, (i, _) in pairs},
        tuple(i for i, _ in unfolded.outputs),
    )
