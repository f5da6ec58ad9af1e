"""What the passes hand to the runtime: one program per pipeline stage.

A program's forward and backward are FX graphs over flat lists. `Value` says what each input and output
is, so that neither the executor nor the memory model has to recognise anything by structure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx


@dataclass(frozen=True)
class Value:
    """One input or output of a stage's forward or backward graph.

    kind, of inputs:  "parameter" | "buffer" | "constant" (held for the whole run), "batch" (this
      microbatch's slice of a batch leaf), "prologue" (computed once a step), "received" (from another
      stage's forward or backward), "saved" (by this stage's forward), "accumulator" (where a
      gradient is added to, for the whole step), "tangent".
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

    parameters: names of the parameters this stage holds, in the order the model names them.
    seconds: predicted (forward, backward) seconds a microbatch, filled in by the planner's cost model.
    """

    stage: int
    forward: fx.GraphModule = field(repr=False)
    forward_inputs: tuple[Value, ...] = field(repr=False)
    forward_outputs: tuple[Value, ...] = field(repr=False)
    backward: fx.GraphModule | None = field(repr=False)
    backward_inputs: tuple[Value, ...] = field(repr=False)
    backward_outputs: tuple[Value, ...] = field(repr=False)
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prologue:
    """Values of the whole global batch that every microbatch needs (a count of labels): once a step."""

    graph: fx.GraphModule = field(repr=False)
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StepProgram:
    """A whole step after all passes: what the runtime runs and the memory model reads.

    stages: one program a stage, in order. Edges are (source stage, destination stage).
    partial: names of parameters whose gradients are partial sums over the data axis.
    """

    stages: tuple[StageProgram, ...]
    prologue: Prologue | None
    forward_edges: frozenset[tuple[int, int]]
    backward_edges: frozenset[tuple[int, int]]
    partial: frozenset[str]
    loss_partial: bool
