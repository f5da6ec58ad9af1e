"""What the passes hand to the runtime: one program per pipeline stage.

A program's forward and backward are FX graphs over flat lists. `Value` says what each input and
output is, so that neither the executor nor the memory model has to recognise anything by structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx


@dataclass(frozen=True)
class Value:
    """One input or output of a stage's forward or backward graph.

    kind, of inputs:  "parameter" | "buffer" | "constant" (held for the whole run), "batch" (this
      microbatch's slice of a batch leaf), "prologue" (computed once a step), "received" (from
      another stage's forward or backward), "saved" (by this stage's forward), "accumulator" (what
      the gradient of a parameter is added to), "bucket" (the flat tensor those lie in), "tangent".
    kind, of outputs: "loss", "output", "buffer", "sent", "saved", "gradient".
    name: parameter or buffer name, or the name of the value in the joint graph.
    peers: stages the value comes from or goes to ("received": one; "sent": one or more).
    leaf: position among the batch's or the output's leaves.
    batch_dim: the tensor dim that carries the batch, or -1.
    """

    kind: str
    name: str
    peers: tuple[int, ...] = ()
    leaf: int = -1
    batch_dim: int = -1


@dataclass(frozen=True)
class StageProgram:
    """Forward and backward of one stage for one microbatch; placeholders carry fake `meta["val"]`.

    Both take one list of inputs, which they empty, so that nothing outlives its last use.
    parameters, buffers: names of those this stage holds, in the order the model names them.
    backwards: the backward graph for the (first, last) microbatch of a step: the first writes
      gradients where the others add them, the last starts the all-reduces. Without accumulators
      there is one microbatch and gradients are plain outputs.
    buckets: names of the gradients in each flat bucket, in the order they become ready.
    """

    stage: int
    forward: fx.GraphModule = field(repr=False)
    forward_inputs: tuple[Value, ...] = field(repr=False)
    forward_outputs: tuple[Value, ...] = field(repr=False)
    backwards: Mapping[tuple[bool, bool], fx.GraphModule] = field(repr=False)
    backward_inputs: tuple[Value, ...] = field(repr=False)
    backward_outputs: tuple[Value, ...] = field(repr=False)
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    buckets: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Prologue:
    """Values of the whole batch that every microbatch needs (a count of labels): once a step."""

    graph: fx.GraphModule = field(repr=False)
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StepProgram:
    """A whole step after all passes: what the runtime runs and the memory model reads.

    stages: one program a stage, in order. Edges are (source stage, destination stage).
    loss_partial: whether the loss is a partial sum over microbatches and the data axis.
    shared: parameters that several stages hold, with those stages: their gradients are summed.
    output_places: leaf of the model's output → where the batch lies in it (`rules.propagate`).
    random: whether some op draws random numbers.
    """

    stages: tuple[StageProgram, ...]
    prologue: Prologue | None
    forward_edges: frozenset[tuple[int, int]]
    backward_edges: frozenset[tuple[int, int]]
    loss_partial: bool
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    output_places: Mapping[int, str | int] = field(default_factory=dict)
    random: bool = False

    @property
    def reached(self) -> frozenset[str]:
        """Parameters that get a gradient on some rank."""
        return frozenset(
            value.name
            for stage in self.stages
            for value in (*stage.backward_inputs, *stage.backward_outputs)
            if value.kind in ("accumulator", "gradient")
        )
