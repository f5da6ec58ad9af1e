"""Replace convex regions of a stage's forward and backward with calls that ONNX Runtime runs.

before                                     after (relu was not chosen)
  %t: f32[32,64] = aten.t(%w)                %region: (f32[8,64]) = ort.region_8c7d...(%x, %w)
  %mm: f32[8,64] = aten.mm(%x, %t)           %mm: f32[8,64] = getitem(%region, 0)
  %relu: f32[8,64] = aten.relu(%mm)          %relu: f32[8,64] = aten.relu(%mm)

Regions of the forward and of its backward are chosen separately: what the backward reads is an
output of the one and an input of the other, as `split_phases` decided. Results keep their strides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.program import OrtDeclined, OrtRegion, OrtReport, StageProgram
from graphaccel.ir.replication.unfold import distinct_nodes
from graphaccel.ir.text import target_text
from graphaccel.ir.values import op_of, propagate, returned
from graphaccel.ort.choose import Chooser
from graphaccel.ort.kernels import Kernels
from graphaccel.ort.partition import Part, fx_graph
from graphaccel.ort.session import Region, Sessions
from graphaccel.ort.translate import memory_order, translate
from graphaccel.planner.plan.plan import Plan

aten = torch.ops.aten


@dataclass(frozen=True)
class Tools:
    """What placement needs. kernels: of the build that will run the plan. sessions: where its
    sessions are stored. wins: keys of region models measured to be faster on this machine than
    torch. watch: receives the programs, in which nothing is then placed, to measure their
    regions."""

    kernels: Kernels
    sessions: Sessions
    wins: frozenset[str] = frozenset()
    watch: Callable[[Sequence[StageProgram]], None] | None = None


def place_ort(
    programs: Sequence[StageProgram], plan: Plan, tools: Tools | None
) -> tuple[tuple[StageProgram, ...], OrtReport | None]:
    """The programs with regions in them, and a report of what was placed and what was not.

    tools: None where nothing is placed (ort="off", or "auto" where nothing was measured).
    """
    if plan.ort == "off" or tools is None:
        return tuple(programs), None
    if tools.watch is not None:
        tools.watch(programs)
        return tuple(programs), None
    log = _Log()
    placed = tuple(_placed(program, plan, tools, log) for program in programs)
    return placed, log.report(tools.kernels.name)


def region_models(programs: Iterable[StageProgram]) -> dict[str, bytes]:
    """The ONNX models in some programs, by the name of their region."""
    targets = [
        n.target
        for p in programs
        for g in (p.forward, *p.backwards.values())
        for n, _ in distinct_nodes(g)
    ]
    return {t.__name__: t.model.content for t in targets if isinstance(t, Region)}


@dataclass
class _Log:
    regions: list[OrtRegion] = field(default_factory=list)
    declined: dict[tuple[str, str], list[fx.Node]] = field(
        default_factory=lambda: defaultdict(list)
    )
    nodes: int = 0
    placed: int = 0

    def report(self, build: str) -> OrtReport:
        rows = sorted(self.declined.items(), key=lambda item: (-len(item[1]), item[0]))
        declined = tuple(
            OrtDeclined(op, reason, _module(nodes[0]), _location(nodes[0]), len(nodes))
            for (op, reason), nodes in rows
        )
        return OrtReport(build, tuple(self.regions), declined, self.nodes, self.placed)


def _unbound(node: fx.Node) -> dict[str, Any]:
    """A node's metadata for another call, without what belongs to its arguments."""
    return {k: v for k, v in node.meta.items() if k != "bind"}


def _module(node: fx.Node) -> str:
    return node.meta.get("module", "")


def _location(node: fx.Node) -> str:
    place = node.meta.get("location")
    return f"{place[0]}:{place[1]}" if isinstance(place, tuple) else str(place or "")


def _placed(program: StageProgram, plan: Plan, tools: Tools, log: _Log) -> StageProgram:
    forward = _Graph(program.forward, program.stage, "forward", plan, tools, log).rewritten()
    results = returned(forward)
    saved = {
        v.name: n.meta["val"]
        for n, v in zip(results, program.forward_outputs, strict=True)
        if v.kind == "saved"
    }
    backwards = {}
    for moment, backward in program.backwards.items():
        nodes = [n for n in backward.graph.nodes if n.op == "placeholder"]
        given = [
            saved[v.name] if v.kind == "saved" else n.meta["val"]
            for n, v in zip(nodes, program.backward_inputs, strict=True)
        ]
        propagate(backward, given)  # strides of region results may differ
        graph = _Graph(backward, program.stage, "backward", plan, tools, log)
        backwards[moment] = graph.rewritten()
    return replace(program, forward=forward, backwards=backwards)


class _Graph:
    """One graph and its rewriter."""

    def __init__(
        self,
        module: fx.GraphModule,
        stage: int,
        phase: str,
        plan: Plan,
        tools: Tools,
        log: _Log,
    ) -> None:
        self.module, self.stage, self.phase = module, stage, phase
        self.plan, self.tools, self.log = plan, tools, log
        self.chooser = Chooser(module.graph, tools.kernels)
        self.flow = self.chooser.flow
        self.fake_mode = fake_mode_of(list(module.graph.nodes))
        self.new = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    # ---- rewriting

    def rewritten(self) -> fx.GraphModule:
        """The graph with its regions replaced by calls."""
        parts = self.chooser.parts(self.plan.ort, self.tools.wins)
        self._count(parts)
        if all(part.label is None for part in parts):
            return self.module
        wanted = self.flow.wanted(parts)
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.copies[node] = self.new.node_copy(node, lambda n: self.copies[n])
        for part in parts:
            if part.label is None:
                for node in part.nodes:
                    self._outside(node)
            else:
                self._region(part, wanted)
        output = self.module.graph.output_node()
        results = [self._outside(n) for n in returned(self.module)]
        self.new.output(results).meta = dict(output.meta)
        module = graph_module(self.module, self.new)
        module.graph.lint()
        return module

    def _count(self, parts: Sequence[Part]) -> None:
        self.log.nodes += len(self.flow.computing)
        for node, reason in self.chooser.refused.items():
            if self.chooser.asked(node, self.plan.ort):
                self.log.declined[(target_text(node.target), reason)].append(node)
        self.log.placed += sum(
            n not in self.flow.owner for p in parts if p.label is not None for n in p.nodes
        )

    def _outside(self, node: fx.Node) -> fx.Node:
        """The copy of a node that is not in a region, with the views it reads through."""
        if node in self.copies:
            return self.copies[node]
        chain = [node]
        while chain:
            missing = [n for n in chain[-1].all_input_nodes if n not in self.copies]
            if missing:
                chain += missing
                continue
            top = chain.pop()
            if top not in self.copies:
                self.copies[top] = self._evaluated(
                    self.new.node_copy(top, lambda n: self.copies[n])
                )
        return self.copies[node]

    def _evaluated(self, node: fx.Node) -> fx.Node:
        """Set the node's value by running it on fake tensors."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        with self.fake_mode, torch.no_grad():
            node.meta["val"] = op_of(node)(*args, **kwargs)
        return node

    def _region(self, part: Part, wanted: set[fx.Node]) -> None:
        nodes, inputs, outputs = self.flow.border(part, wanted)
        given = [self._dense(self._outside(n)) for n in inputs]
        values = {n: g.meta["val"] for n, g in zip(inputs, given, strict=True)}
        model = translate(nodes, values, outputs, self.tools.kernels)
        module = _common(_module(n) for n in part.nodes)
        name = f"{module or 'outside any module'} ({self.phase})"
        spare = fx_graph(nodes, inputs, outputs) if self.plan.fallback == "fx" else None
        region = Region(model, self.tools.sessions, name, spare)
        call = self.new.call_function(region, tuple(given))
        call.meta = self._meta(part.nodes[-1], module) | {"scratch": model.scratch}
        self._evaluated(call)
        for index, node in enumerate(outputs):
            item = self.new.call_function(getitem, (call, index))
            item.meta = {**_unbound(node), "made_by": "place_ort"}
            self.copies[node] = self._evaluated(item)
        count = sum(n not in self.flow.owner for n in part.nodes)
        self.log.regions.append(OrtRegion(self.stage, self.phase, module, model.key, count))

    def _meta(self, node: fx.Node, module: str) -> dict[str, Any]:
        kept = {k: v for k, v in node.meta.items() if k in ("phase", "origin", "location")}
        return {**kept, "module": module, "made_by": "place_ort"}

    def _dense(self, node: fx.Node) -> fx.Node:
        """A region reads dense memory; an input with gaps is copied first."""
        if memory_order(node.meta["val"]) is not None:
            return node
        copy = self.new.call_function(
            aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
        copy.meta = {**_unbound(node), "made_by": "place_ort"}
        return self._evaluated(copy)


def _common(modules: Iterable[str]) -> str:
    """The longest common prefix of all module paths."""
    paths = [m.split(".") if m else [] for m in modules]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
