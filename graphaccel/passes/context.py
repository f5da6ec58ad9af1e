"""The context that every pass takes and returns: inputs of a run, and the results so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy
import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.calls import is_random
from graphaccel.ir.program import OrtReport, Owned, Sharded, StageProgram
from graphaccel.passes.microbatch.exact_microbatch import LocalStep
from graphaccel.passes.place_ort import Tools
from graphaccel.passes.stages.cut_stages import StagedGraph
from graphaccel.passes.stages.outline_stages import StageOutline, outline_stages
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.local_graph import LocalGraph

Sizes: TypeAlias = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class Fixed:
    """Layout of parameters that another running program has fixed (`pipeline.build`); None where
    the plan decides."""

    homes: Mapping[str, tuple[int, ...]] | None = None
    parameter_shards: Mapping[str, tuple[Sharded, ...]] | None = None
    groups: tuple[tuple[str, ...], ...] | None = None
    ranks: int | None = None


@dataclass(frozen=True)
class Context:
    """The inputs of a run, and the results of the passes so far.

    step, plan, sizes, gradients, fixed, ort, device: as `pipeline.build` takes them; the first
    passes rewrite the step.
    local: the step of one microbatch of one data rank. axes: its graph on one rank of the tensor,
    context and expert axes, rewritten in place from then on.
    owned, unsharded: parameter → what ZeRO shards of it, or why it stays replicated.
    staged: the stage of every node. shared: parameter → stages, for those that several stages hold.
    outlines: the stages that are rewritten; None before they are outlined.
    programs: one a stage. weights: the gradients of parameters, where they are computed apart from
    the backward, as a program each. unsummed: the programs before gradients are accumulated.
    report: what ONNX Runtime runs.
    """

    step: StepGraph
    plan: Plan
    sizes: Sizes | None = None
    gradients: bool = True
    fixed: Fixed = Fixed()
    ort: Tools | None = None
    device: str = "cpu"
    local: LocalStep | None = None
    axes: LocalGraph | None = None
    owned: Mapping[str, Owned] = field(default_factory=dict)
    unsharded: Mapping[str, str] = field(default_factory=dict)
    staged: StagedGraph | None = None
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outlines: tuple[StageOutline, ...] | None = None
    programs: tuple[StageProgram, ...] = ()
    weights: tuple[StageProgram, ...] = ()
    unsummed: tuple[StageProgram, ...] = ()
    report: OrtReport | None = None

    @property
    def part(self) -> LocalStep:
        """The step of one microbatch, a result of `exact_microbatch`."""
        assert self.local is not None
        return self.local

    @property
    def rank(self) -> LocalGraph:
        """The graph of one rank, a result of `shard_axes`."""
        assert self.axes is not None
        return self.axes

    @property
    def stages(self) -> StagedGraph:
        """The stages, a result of `cut_stages`."""
        assert self.staged is not None
        return self.staged

    @property
    def parameters(self) -> dict[str, fx.Node]:
        """Parameter → its input in the graph of one rank."""
        nodes = self.rank.graph.graph.find_nodes(op="placeholder")
        inputs = zip(nodes, self.step.inputs, strict=False)
        return {spec.name: node for node, spec in inputs if spec.kind == "parameter"}

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Parameter → its fake value on one rank."""
        return {name: node.meta["val"] for name, node in self.parameters.items()}

    @property
    def random(self) -> bool:
        """Whether any call draws random numbers."""
        calls = self.stages.graph.graph.nodes
        return any(is_random(n) for n in calls if n.op == "call_function")

    @property
    def outlined(self) -> tuple[StageOutline, ...]:
        """The inputs, nodes and outputs of each stage's phases."""
        if self.outlines is not None:
            return self.outlines
        return outline_stages(self.stages, self.step, keep_outputs=self.plan.outputs == "all")

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The current graphs by name."""
        if self.programs:
            return {
                f"stage {program.stage} {name}": graph
                for program in self.programs
                for name, graph in graphs_of(program).items()
            }
        if self.axes is not None:
            return {"one rank": self.axes.graph}
        return {"step": self.step.graph if self.local is None else self.local.graph}


def graphs_of(program: StageProgram) -> dict[str, fx.GraphModule]:
    """The graphs of a stage by phase: "prepare", "head", "forward", "backward first last", ..."""
    once = {"prepare": program.prepare, "head": program.head, "forward": program.forward}
    results = {name: graph for name, graph in once.items() if graph is not None}
    for phase, graphs in (("backward", program.backwards), ("weight", program.weights)):
        for (first, last), graph in graphs.items():
            results[phase + " first" * first + " last" * last] = graph
    return results
