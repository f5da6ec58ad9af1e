"""Stage programs: the contract between passes and runtime, one program per pipeline stage.

A program's forward and backward are FX graphs over flat lists. `Value` says what each input and
output is, so that neither the executor nor the memory model has to infer it from the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Sharded:
    """One split of a tensor over a mesh axis: dim `dim` is divided into as many equal parts as the
    axis has devices, the last of which are padded where these do not divide it. outer: the dim is
    viewed as [outer, size / outer], and every one of the `outer` sections is divided (fused query,
    key and value weights: outer 3); DTensor calls it _StridedShard(split_factor=outer)."""

    axis: str
    dim: int
    outer: int = 1

    def local(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """One rank's shape of a tensor of `shape`, with its padding."""
        return tuple(-(-n // ranks) if d == self.dim else n for d, n in enumerate(shape))


@dataclass(frozen=True)
class Owned:
    """What ZeRO shards of one parameter, and how. level: 1 its optimizer state, 2 also its
    gradient, 3 also the parameter itself, which is gathered where it is used."""

    level: int
    split: Sharded


@dataclass(frozen=True)
class Value:
    """One input or output of a stage's forward or backward graph.

    kind, of inputs:  "parameter" | "buffer" | "constant" (held for the whole run), "batch" (this
      microbatch's slice of a batch leaf), "prologue" (computed once a step), "received" (from
      another stage's forward or backward), "saved" (by this stage's forward), "accumulator" (to
      which the gradient of a parameter is added), "bucket" (the flat tensor that contains those),
      "tangent" (the gradient of output leaf `leaf`), "scale", "shards" (the flat shards of a group
      of parameters, held like a parameter; named after the first of them), "held" (a parameter as
      `prepare` returned it), "carried".
    kind, of outputs: "loss", "output", "buffer", "sent", "saved", "gradient", "input_gradient" (of
      batch leaf `leaf`), "carried" (the flat gradients of a group, an input of the next
      microbatch's backward; the last one's are the reduced shards), "held".
    kind, around the head: "joined", "summed", "same" (a part's value, output of a forward; the
      whole batch's, input of the head: `sharding.rules.parts`), "headed" (output of the head, input
      of the backwards).
    name: parameter or buffer name, or the name of the value in the joint graph.
    peers: stages that the value is received from or sent to ("received": one; "sent": one or more).
    leaf: position among the batch's or the output's leaves.
    batch_dim: the tensor dim that carries the batch, or -1: of a leaf of the batch, a value of the
      prologue and one of the head, each part reads its own slice along it. outer: sections before
      the batch in that dim, each with all examples.
    """

    kind: str
    name: str
    peers: tuple[int, ...] = ()
    leaf: int = -1
    batch_dim: int = -1
    outer: int = 1


@dataclass(frozen=True)
class OrtRegion:
    """A region that ONNX Runtime runs in one call. module: common path of its ops. key: hash of its
    model. ops: number of graph nodes it replaces."""

    stage: int
    phase: str
    module: str
    key: str
    ops: int


@dataclass(frozen=True)
class OrtDeclined:
    """Nodes that were requested but not placed: how many equal ones, and the location of the
    first."""

    op: str
    reason: str
    module: str
    location: str
    count: int


@dataclass(frozen=True)
class OrtReport:
    """Where ONNX Runtime is used. build: "training 1.19.2". nodes: number in all graphs, without
    views, which cost nothing; placed: number of them in regions."""

    build: str
    regions: tuple[OrtRegion, ...] = ()
    declined: tuple[OrtDeclined, ...] = ()
    nodes: int = 0
    placed: int = 0


@dataclass(frozen=True)
class StageProgram:
    """Forward and backward of one stage for one microbatch; placeholders carry fake `meta["val"]`.

    Both take one list of inputs, which they empty, so that no value outlives its last use.
    parameters, buffers: names of those this stage holds, in the order of the model.
    backwards: the backward graph for the (first, last) microbatch of a step: the first writes
      gradients where the others add them, the last starts the all-reduces. Without accumulators
      there is one microbatch and gradients are plain outputs.
    buckets: names of the gradients in each flat bucket, in the order they become ready.
    weights: the part of the backward that computes gradients of parameters, where the schedule
      runs it separately (`passes.stages.split_weights`), by the same moments; else empty.
    groups: parameters that are sharded over the data axis, by the flat buffer that contains them.
    reduced: those whose gradients are reduce-scattered, by the flat buffer, in its order.
    prepare: what runs once a step, before anything else, where parameters are gathered or cast for
      all microbatches at once (`passes.parameters.gather_once`,
      `passes.parameters.cast_parameters_once`): it returns "held" parameters, possibly in flight,
      which live until the last phase of the stage has run.
    head: of the last stage, what runs once on the whole batch, after all forwards and before any
      backward (`passes.microbatch.two_pass_head`).
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
    groups: tuple[tuple[str, ...], ...] = ()
    reduced: tuple[tuple[str, ...], ...] = ()
    weights: Mapping[tuple[bool, bool], fx.GraphModule] = field(default_factory=dict, repr=False)
    weight_inputs: tuple[Value, ...] = field(default=(), repr=False)
    weight_outputs: tuple[Value, ...] = field(default=(), repr=False)
    prepare: fx.GraphModule | None = field(default=None, repr=False)
    prepare_inputs: tuple[Value, ...] = field(default=(), repr=False)
    prepare_outputs: tuple[Value, ...] = field(default=(), repr=False)
    head: fx.GraphModule | None = field(default=None, repr=False)
    head_inputs: tuple[Value, ...] = field(default=(), repr=False)
    head_outputs: tuple[Value, ...] = field(default=(), repr=False)

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """All of its graphs, the forward first."""
        once = tuple(g for g in (self.prepare, self.head) if g is not None)
        return (self.forward, *self.backwards.values(), *self.weights.values(), *once)

    @property
    def results(self) -> tuple[tuple[fx.GraphModule, tuple[Value, ...]], ...]:
        """The graphs that may return the loss, the model's outputs and new values of buffers, with
        their outputs."""
        forward = (self.forward, self.forward_outputs)
        return (forward,) if self.head is None else (forward, (self.head, self.head_outputs))

    def gradients(self) -> tuple[fx.GraphModule | None, tuple[Value, ...]]:
        """A graph that computes gradients of parameters, and its inputs; None where there is
        none."""
        graphs, values = self.backwards, self.backward_inputs
        if self.weights:
            graphs, values = self.weights, self.weight_inputs
        return next(iter(graphs.values()), None), values

    def phase(
        self, kind: str, first: bool, last: bool
    ) -> tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]:
        """(graph, inputs, outputs) of a "forward", "backward" or "weight" of a step's first, last
        or any other microbatch, or of the "head"."""
        if kind == "head":
            assert self.head is not None
            return self.head, self.head_inputs, self.head_outputs
        if kind == "forward":
            return self.forward, self.forward_inputs, self.forward_outputs
        graphs, inputs, outputs = (
            (self.backwards, self.backward_inputs, self.backward_outputs)
            if kind == "backward"
            else (self.weights, self.weight_inputs, self.weight_outputs)
        )
        # A phase without gradients of parameters has one graph for all microbatches.
        return graphs.get((first, last)) or next(iter(graphs.values())), inputs, outputs


@dataclass(frozen=True)
class Prologue:
    """Values of the whole batch that every microbatch needs (a count of labels): once a step."""

    graph: fx.GraphModule = field(repr=False)
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that it reads: every stage holds them."""
        return tuple(v.name for v in self.inputs if v.kind == "buffer")


@dataclass(frozen=True)
class StepProgram:
    """A whole step after all passes: what the runtime runs and the memory model reads.

    stages: one program a stage, in order. Edges are (source stage, destination stage).
    loss_partial: whether the loss is a partial sum over microbatches and the data axis.
    shared: parameters that several stages hold, with those stages: their gradients are summed.
    output_places: leaf of the model's output → batch placement (`sharding.rules.propagate`).
    input_places: leaf of the batch → batch placement of its gradient, where it needs one.
    random: whether any op draws random numbers. shared_draws: whether the prologue does, so that
      ranks have to draw alike.
    parameter_shards: parameter → the splits under which it, its gradient and its optimizer state
      are stored, in the order in which they are applied (tensor axis first, then data); replicated
      if none.
    partial: parameter → axes besides data over which its gradient is a partial sum when the
      backward returns it: `accumulate_gradients` reduces over them too.
    data: number of ranks that split the batch.
    bare: the stage without accumulators, where the loss is outside of the graph: which of its
      outputs a loss reads is known when it is differentiated
      (`passes.gradients.prune_output_gradients`).
    owned: parameter → what ZeRO shards of it. unsharded: parameter → why it is not sharded.
    ort: what ONNX Runtime runs of it.
    """

    stages: tuple[StageProgram, ...]
    prologue: Prologue | None
    forward_edges: frozenset[tuple[int, int]]
    backward_edges: frozenset[tuple[int, int]]
    loss_partial: bool
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    output_places: Mapping[int, Any] = field(default_factory=dict)
    random: bool = False
    shared_draws: bool = False
    parameter_shards: Mapping[str, tuple[Sharded, ...]] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    input_places: Mapping[int, object] = field(default_factory=dict)
    data: int = 1
    bare: StageProgram | None = field(default=None, repr=False)
    owned: Mapping[str, Owned] = field(default_factory=dict)
    unsharded: Mapping[str, str] = field(default_factory=dict)
    ort: OrtReport | None = None

    @property
    def headed(self) -> bool:
        """Whether part of the step runs once on the whole batch."""
        return self.stages[-1].head is not None

    @property
    def tangents(self) -> tuple[int, ...]:
        """Output leaves with respect to which a loss outside of the graph can be differentiated."""
        return tuple(v.leaf for p in self.stages for v in p.backward_inputs if v.kind == "tangent")

    @property
    def written(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Buffer → the stage that computes its new value, and all that hold it, that one
        included."""
        makers = {
            value.name: stage.stage
            for stage in self.stages
            for _, values in stage.results
            for value in values
            if value.kind == "buffer"
        }
        holders = {
            name: {stage.stage for stage in self.stages if name in stage.buffers} for name in makers
        }
        return {n: (at, tuple(sorted({at, *holders[n]}))) for n, at in makers.items()}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of parameters that are sharded over data, of all stages, each once."""
        return tuple(dict.fromkeys(g for stage in self.stages for g in stage.groups))

    def gradient_splits(self, name: str) -> tuple[Sharded, ...]:
        """The splits under which a parameter's gradient is returned."""
        splits, owned = self.parameter_shards.get(name, ()), self.owned.get(name)
        return (*splits, owned.split) if owned is not None and owned.level == 2 else splits

    def state_splits(self, name: str) -> tuple[Sharded, ...]:
        """The splits under which its optimizer state is stored."""
        splits, owned = self.parameter_shards.get(name, ()), self.owned.get(name)
        return (*splits, owned.split) if owned is not None and owned.level < 3 else splits

    @property
    def reached(self) -> frozenset[str]:
        """Parameters that get a gradient on some rank."""
        return frozenset(
            value.name
            for stage in self.stages
            for value in (
                *stage.backward_inputs,
                *stage.backward_outputs,
                *stage.weight_inputs,
                *stage.weight_outputs,
            )
            if value.kind in ("accumulator", "gradient")
        ) | {n for stage in self.stages for group in stage.reduced for n in group}
