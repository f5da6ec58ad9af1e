"""List the inputs, nodes and outputs of every stage's forward and backward before building them.

What the backward reads of the forward is "saved" by the forward and passed to the backward;
parameters, batch leaves and prologue values are inputs of both instead. A later stage's forward
value that an earlier stage's backward reads (rare) is sent with the gradients. What only outputs
read that the plan does not keep is in no stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from torch import fx

from graphaccel.capture.export.export import GraphOutput
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.program import Value
from graphaccel.ir.values import returned
from graphaccel.passes.stages.cut_stages import StagedGraph


@dataclass(frozen=True)
class Outline:
    """One phase of a stage: nodes of the joint graph, in its order. inputs: computed elsewhere."""

    inputs: tuple[tuple[fx.Node, Value], ...] = field(repr=False)
    body: tuple[fx.Node, ...] = field(repr=False)
    outputs: tuple[tuple[fx.Node, Value], ...] = field(repr=False)


@dataclass(frozen=True)
class StageOutline:
    """Both phases of a stage; the parameters and buffers it holds, in the order of the model."""

    stage: int
    forward: Outline
    backward: Outline
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def outline_stages(
    staged: StagedGraph, step: StepGraph, *, keep_outputs: bool = False
) -> tuple[StageOutline, ...]:
    """One outline a stage. Placeholders of the joint graph that are not inputs of the step are
    prologue values, named after themselves.

    keep_outputs: also return what the model returns besides its loss.
    """
    graph = staged.graph.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    kinds = {
        n: Value(s.kind, s.name, leaf=s.leaf, batch_dim=step.batch_dims.get(s.leaf, -1))
        if s.kind == "batch"
        else Value(s.kind, s.name, leaf=s.leaf)
        for n, s in zip(placeholders, step.inputs, strict=False)
    }
    kinds |= {n: _of_prologue(n) for n in placeholders[len(step.inputs) :]}
    wanted = _wanted(staged, step.outputs, keep_outputs)
    read = _read(staged, wanted)
    joint = _Joint(staged, read, kinds, wanted, _demands(staged, read, wanted))
    return tuple(_Stage(joint, stage).outline() for stage in range(staged.stages))


def _of_prologue(node: fx.Node) -> Value:
    dim, outer = node.meta.get("slice", (-1, 1))
    return Value("prologue", node.name, batch_dim=dim, outer=outer)


@dataclass
class _Wanted:
    """Graph outputs by the stage that computes them: (value, what it is)."""

    forward: dict[int, list[tuple[fx.Node, Value]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    backward: dict[int, list[tuple[fx.Node, Value]]] = field(
        default_factory=lambda: defaultdict(list)
    )


def _wanted(staged: StagedGraph, outputs: Sequence[GraphOutput], keep: bool) -> _Wanted:
    wanted = _Wanted()
    last = staged.stages - 1
    # further partial gradients are at its end
    for node, spec in zip(returned(staged.graph), outputs, strict=False):
        if spec.kind == "gradient" or (spec.kind == "output" and not keep):
            continue
        value = Value(spec.kind, spec.name, leaf=spec.leaf)
        # an input's gradient is of a step without a loss, which is one stage
        if spec.kind == "input_gradient" or (node in staged.stage and node.meta.get("head")):
            wanted.backward[last].append((node, value))
            continue
        wanted.forward[staged.stage.get(node, last)].append((node, value))
    for name, terms in staged.gradients.items():
        for stage, node in terms:
            wanted.backward[stage].append((node, Value("gradient", name)))
    return wanted


def _read(staged: StagedGraph, wanted: _Wanted) -> dict[fx.Node, int]:
    """The nodes that results depend on, or that have an effect of their own, with their stages."""
    stack = [
        n for results in (wanted.forward, wanted.backward) for r in results.values() for n, _ in r
    ]
    stack += [n for n in staged.stage if n.op == "call_function" and n.is_impure()]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return {node: stage for node, stage in staged.stage.items() if node in seen}


@dataclass
class _Demands:
    """Which stages read a value in their forward, and which in their backward."""

    forward: dict[fx.Node, set[int]] = field(default_factory=lambda: defaultdict(set))
    backward: dict[fx.Node, set[int]] = field(default_factory=lambda: defaultdict(set))


def _demands(staged: StagedGraph, read: Mapping[fx.Node, int], wanted: _Wanted) -> _Demands:
    """Every read of a staged value by a node (or by a free node that a stage computes itself)."""
    demands = _Demands()
    for node, stage in read.items():
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


class _Joint:
    """Facts about the joint graph. read: what results depend on, by stage. order: of its nodes.
    own: those of each stage and phase, in order; held: parameters and buffers of each stage, in the
    order of assignment."""

    def __init__(
        self,
        staged: StagedGraph,
        read: Mapping[fx.Node, int],
        kinds: Mapping[fx.Node, Value],
        wanted: _Wanted,
        demands: _Demands,
    ) -> None:
        self.staged, self.kinds, self.wanted, self.demands = staged, kinds, wanted, demands
        self.order: dict[fx.Node, int] = {}
        self.own: dict[tuple[int, str], list[fx.Node]] = defaultdict(list)
        for i, node in enumerate(staged.graph.graph.nodes):
            self.order[node] = i
            if node in read:
                self.own[read[node], node.meta["phase"]].append(node)
        self.held: dict[int, list[fx.Node]] = defaultdict(list)
        for node, stage in read.items():
            self.held[stage].append(node)
        self.names = {
            kind: {v.name for v in kinds.values() if v.kind == kind}
            for kind in ("parameter", "buffer")
        }

    def is_forward(self, node: fx.Node) -> bool:
        return node in self.staged.stage and node.meta["phase"] == "forward"


class _Stage:
    """Builds the outline of one stage."""

    def __init__(self, joint: _Joint, stage: int) -> None:
        self.joint, self.stage = joint, stage
        self.staged, self.wanted, self.demands = joint.staged, joint.wanted, joint.demands

    def outline(self) -> StageOutline:
        stage, joint = self.stage, self.joint
        back = self._sent_backward()
        given, body = self._phase("backward", self.wanted.backward[stage], [n for n, _ in back])
        reads = [n for n in given if joint.is_forward(n)]
        saved = [n for n in reads if self.staged.stage[n] <= stage]
        backward = Outline(
            tuple((n, self._value(n, "backward")) for n in given),
            tuple(body),
            (*self.wanted.backward[stage], *back),
        )
        given, body = self._phase("forward", self.wanted.forward[stage], saved)
        forward = Outline(
            tuple((n, self._value(n, "forward")) for n in given),
            tuple(body),
            (
                *self.wanted.forward[stage],
                *self._sent_forward(),
                *((n, Value("saved", n.name)) for n in saved),
            ),
        )
        here = [n for n, at in self.staged.homes.items() if stage in at]
        return StageOutline(
            stage,
            forward,
            backward,
            tuple(n for n in here if n in joint.names["parameter"]),
            tuple(n for n in here if n in joint.names["buffer"]),
        )

    def _sent_forward(self) -> list[tuple[fx.Node, Value]]:
        """Values of this stage that later stages read, in either phase."""
        collected = []
        for node in self.joint.held[self.stage]:
            if node.meta["phase"] != "forward":
                continue
            readers = self.demands.forward[node] | self.demands.backward[node]
            peers = tuple(sorted(s for s in readers if s > self.stage))
            if peers:
                collected.append((node, Value("sent", node.name, peers)))
        return collected

    def _sent_backward(self) -> list[tuple[fx.Node, Value]]:
        """Values of this stage that the backwards of earlier stages read."""
        collected = []
        for node in self.joint.held[self.stage]:
            peers = tuple(sorted(s for s in self.demands.backward[node] if s < self.stage))
            if peers:
                collected.append((node, Value("sent", node.name, peers)))
        return collected

    def _phase(
        self, phase: str, results: Sequence[tuple[fx.Node, Value]], extra: Sequence[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """(inputs, body): nodes of the stage, with the free nodes they need."""
        stack = [*self.joint.own[self.stage, phase], *(n for n, _ in results), *extra]
        own = set(self.joint.own[self.stage, phase])
        seen: set[fx.Node] = set()
        body, given = [], []
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            at = self.joint.order[node]
            if node in own or node in self.staged.free:
                body.append((at, node))
                stack += node.all_input_nodes
            else:
                given.append((at, node))
        return _in_order(given), _in_order(body)

    def _value(self, node: fx.Node, phase: str) -> Value:
        if node in self.joint.kinds:
            return self.joint.kinds[node]
        source = self.staged.stage[node]
        if phase == "forward" or not self.joint.is_forward(node) or source > self.stage:
            return Value("received", node.name, (source,))
        return Value("saved", node.name)


def _in_order(placed: list[tuple[int, fx.Node]]) -> list[fx.Node]:
    return [node for _, node in sorted(placed, key=itemgetter(0))]
