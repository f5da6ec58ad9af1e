"""Split the joint graph of every stage into its forward and its backward.

What the backward reads of the forward becomes an output "saved" of the one and an input of the
other; parameters, batch leaves and prologue values are given to both instead. A later stage's
forward value that an earlier stage's backward reads (rare) travels with the gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from graphaccel.capture.export import GraphInput, GraphOutput
from graphaccel.compat.torch import graph_module
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.values import is_dense, propagate, returned
from graphaccel.passes.cut_stages import StagedGraph


def split_phases(
    staged: StagedGraph,
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    batch_dims: Mapping[int, int],
    *,
    keep_outputs: bool,
) -> tuple[StageProgram, ...]:
    """One program a stage.

    inputs: of the joint graph's first placeholders; the rest are prologue values, named after
    themselves. keep_outputs: hand out what the model returns besides its loss.
    """
    graph = staged.graph.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    kinds = {
        n: Value(s.kind, s.name, leaf=s.leaf, batch_dim=batch_dims.get(s.leaf, -1))
        if s.kind == "batch"
        else Value(s.kind, s.name, leaf=s.leaf)
        for n, s in zip(placeholders, inputs, strict=False)
    }
    kinds |= {n: Value("prologue", n.name) for n in placeholders[len(inputs) :]}
    wanted = _wanted(staged, outputs, keep_outputs)
    demands = _demands(staged, wanted)
    return tuple(_Stage(staged, s, kinds, wanted, demands).program() for s in range(staged.stages))


@dataclass
class _Wanted:
    """Graph outputs by the stage that makes them: (value, what it is)."""

    forward: dict[int, list[tuple[fx.Node, Value]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    backward: dict[int, list[tuple[fx.Node, Value]]] = field(
        default_factory=lambda: defaultdict(list)
    )


def _wanted(staged: StagedGraph, outputs: Sequence[GraphOutput], keep: bool) -> _Wanted:
    wanted = _Wanted()
    last = staged.stages - 1
    # further partial gradients stand at its end
    for node, spec in zip(returned(staged.graph), outputs, strict=False):
        if spec.kind == "gradient" or (spec.kind == "output" and not keep):
            continue
        value = Value(spec.kind, spec.name, leaf=spec.leaf)
        if spec.kind == "input_gradient":  # of a step without a loss, which is one stage
            wanted.backward[last].append((node, value))
            continue
        wanted.forward[staged.stage.get(node, last)].append((node, value))
    for name, terms in staged.gradients.items():
        for stage, node in terms:
            wanted.backward[stage].append((node, Value("gradient", name)))
    return wanted


@dataclass
class _Demands:
    """Which stages read a value in their forward, and which in their backward."""

    forward: dict[fx.Node, set[int]] = field(default_factory=lambda: defaultdict(set))
    backward: dict[fx.Node, set[int]] = field(default_factory=lambda: defaultdict(set))


def _demands(staged: StagedGraph, wanted: _Wanted) -> _Demands:
    """Every read of a staged value by a node (or by a free node that a stage makes for itself)."""
    demands = _Demands()
    for node, stage in staged.stage.items():
        table = demands.forward if node.meta["phase"] == "forward" else demands.backward
        for source in node.all_input_nodes:
            if source in staged.stage:
                table[source].add(stage)
    for stage, results in wanted.forward.items():
        for node, _ in results:
            if node in staged.stage:
                demands.forward[node].add(stage)
    for stage, results in wanted.backward.items():
        for node, _ in results:
            if node in staged.stage and node.meta["phase"] == "forward":
                demands.backward[node].add(stage)
    return demands


class _Stage:
    """Builds the two graphs of one stage."""

    def __init__(
        self,
        staged: StagedGraph,
        stage: int,
        kinds: Mapping[fx.Node, Value],
        wanted: _Wanted,
        demands: _Demands,
    ) -> None:
        self.staged, self.stage, self.kinds = staged, stage, kinds
        self.wanted, self.demands = wanted, demands

    def program(self) -> StageProgram:
        stage = self.stage
        backward = self._phase("backward", {})
        forward_reads = [n for n in backward.reads if self._is_forward(n)]
        saved = [n for n in forward_reads if self.staged.stage[n] <= stage]
        sent = self._sent_forward()
        forward = self._phase("forward", {n: None for n in saved})
        forward_outputs = [*self.wanted.forward[stage], *sent]
        forward_outputs += [(n, Value("saved", n.name)) for n in saved]
        backward_outputs = [*self.wanted.backward[stage], *self._sent_backward()]
        holds = self.staged.homes
        return StageProgram(
            stage,
            forward.module([n for n, _ in forward_outputs]),
            tuple(self._value(n, "forward") for n in forward.inputs),
            tuple(v for _, v in forward_outputs),
            {(True, True): backward.module([n for n, _ in backward_outputs])},
            tuple(self._value(n, "backward") for n in backward.inputs),
            tuple(v for _, v in backward_outputs),
            tuple(n for n, at in holds.items() if stage in at and n in self._names("parameter")),
            tuple(n for n, at in holds.items() if stage in at and n in self._names("buffer")),
        )

    def _names(self, kind: str) -> set[str]:
        return {v.name for v in self.kinds.values() if v.kind == kind}

    def _is_forward(self, node: fx.Node) -> bool:
        return node in self.staged.stage and node.meta["phase"] == "forward"

    def _sent_forward(self) -> list[tuple[fx.Node, Value]]:
        """Values of this stage that later stages read, in either phase."""
        found = []
        for node, stage in self.staged.stage.items():
            if stage != self.stage or node.meta["phase"] != "forward":
                continue
            readers = self.demands.forward[node] | self.demands.backward[node]
            peers = tuple(sorted(s for s in readers if s > stage))
            if peers:
                found.append((node, Value("sent", node.name, peers)))
        return found

    def _sent_backward(self) -> list[tuple[fx.Node, Value]]:
        """Values of this stage that earlier stages' backwards read."""
        found = []
        for node, stage in self.staged.stage.items():
            if stage != self.stage:
                continue
            peers = tuple(sorted(s for s in self.demands.backward[node] if s < stage))
            if peers:
                found.append((node, Value("sent", node.name, peers)))
        return found

    def _phase(self, phase: str, extra: Mapping[fx.Node, None]) -> _Builder:
        results = (self.wanted.forward if phase == "forward" else self.wanted.backward)[self.stage]
        own = [
            n
            for n in self.staged.graph.graph.nodes
            if self.staged.stage.get(n) == self.stage and n.meta["phase"] == phase
        ]
        sent = [] if phase == "forward" else [n for n, _ in self._sent_backward()]
        builder = _Builder(self.staged, self.stage, phase)
        builder.add([*own, *(n for n, _ in results), *sent, *extra])
        return builder

    def _value(self, node: fx.Node, phase: str) -> Value:
        if node in self.kinds:
            return self.kinds[node]
        source = self.staged.stage[node]
        if phase == "forward" or not self._is_forward(node) or source > self.stage:
            return Value("received", node.name, (source,))
        return Value("saved", node.name)


class _Builder:
    """Copies some nodes of the joint graph, with the free nodes they need, into a graph of its
    own."""

    def __init__(self, staged: StagedGraph, stage: int, phase: str) -> None:
        self.staged, self.stage, self.phase = staged, stage, phase
        self.body: dict[fx.Node, None] = {}
        self.inputs: list[fx.Node] = []

    @property
    def reads(self) -> list[fx.Node]:
        """Staged values that come from outside this graph."""
        return [n for n in self.inputs if n in self.staged.stage]

    def add(self, nodes: Sequence[fx.Node]) -> None:
        chosen: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            own = self.staged.stage.get(node) == self.stage and node.meta["phase"] == self.phase
            if own or node in self.staged.free:
                chosen.add(node)
                stack += node.all_input_nodes
        for node in self.staged.graph.graph.nodes:
            if node in chosen:
                self.body[node] = None
            elif node in seen:
                self.inputs.append(node)

    def module(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        values = []
        for node in self.inputs:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(node.meta)
            value = node.meta["val"]
            foreign = self.staged.stage.get(node, self.stage) != self.stage
            # What travels arrives dense: an expanded tensor is sent as a plain one.
            values.append(value.contiguous() if foreign and not is_dense(value) else value)
        for node in self.body:
            made[node] = graph.node_copy(node, lambda n: made[n])
        result = graph.output([made[n] for n in outputs])
        result.meta["phase"] = "output"
        module = graph_module(self.staged.graph, graph)
        propagate(module, values)
        return module
