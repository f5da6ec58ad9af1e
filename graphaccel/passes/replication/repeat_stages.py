"""Copy the rewritten program of one stage to the stages that equal it, under their names.

before (stage 1)                            after (stage 2)
  %shards_0: f32[1024] = input                %shards_0: f32[1024] = input
  %all = all_gather(%shards_0)   # layers.1   %all = all_gather(%shards_0)   # layers.3
  %mm_4 = aten.mm(%add_3, %all)  # layers.1   %mm_12 = aten.mm(%add_9, %all) # layers.3

`equal_stages` finds which stages are equal, and the names of what they read. Runs last: all that
passes do to a stage is done once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.nodes import new_node
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.replication.layers import split
from graphaccel.ir.values import keep_shares
from graphaccel.passes.replication.equal_stages import EqualStage

_AFTER_PARAMETERS = (
    "parameter", "buffer", "constant", "gradient", "shard", "shards", "held", "carried",
    "accumulator",
)  # fmt: skip
_PREFIXES = ("whole ", "kept_")  # of values that are saved, before another name


def repeat_stages(
    programs: Sequence[StageProgram], equal: Mapping[int, EqualStage]
) -> tuple[StageProgram, ...]:
    """The programs of all stages. programs: of those that are not copies. twins: by stage.

    Copies of a node share its value.
    """
    built = {program.stage: program for program in programs}
    if equal:
        for program in programs:
            for module in program.graphs:
                keep_shares(module.graph)
    for stage, one in equal.items():
        built[stage] = _Copy(one).of(built[one.like])
    return tuple(built[stage] for stage in sorted(built))


class _Copy:
    """Translates the program of an equal stage into the names of this one."""

    def __init__(self, equal: EqualStage) -> None:
        self.equal = equal
        self.names = {a.name: b.name for a, b in equal.nodes.items()}
        self.origins: dict[str, str] = {}
        self.stacks: dict[int, Any] = {}
        self.shifts: dict[str, int] = {}
        last: dict[str, int] = {}
        for a, b in equal.nodes.items():
            if "origin" in a.meta and "origin" in b.meta:
                self.origins[a.meta["origin"]] = b.meta["origin"]
            if "nn_module_stack" in a.meta and "nn_module_stack" in b.meta:
                self.stacks[id(a.meta["nn_module_stack"])] = b.meta["nn_module_stack"]
            (base, number), (other, its) = split(a.name), split(b.name)
            if base == other and number >= last.get(base, 0):
                last[base], self.shifts[base] = number, its - number

    def of(self, program: StageProgram) -> StageProgram:
        """The program of the stage, from that of the stage it equals."""
        named = self.equal.named
        return replace(
            program,
            stage=self.equal.outline.stage,
            forward=self._graph(program.forward),
            forward_inputs=self._values(program.forward_inputs),
            forward_outputs=self._values(program.forward_outputs),
            backwards={m: self._graph(g) for m, g in program.backwards.items()},
            backward_inputs=self._values(program.backward_inputs),
            backward_outputs=self._values(program.backward_outputs),
            parameters=self.equal.outline.parameters,
            buffers=self.equal.outline.buffers,
            buckets=tuple(tuple(named[n] for n in group) for group in program.buckets),
            groups=tuple(tuple(named[n] for n in group) for group in program.groups),
            reduced=tuple(tuple(named[n] for n in group) for group in program.reduced),
            weights={m: self._graph(g) for m, g in program.weights.items()},
            weight_inputs=self._values(program.weight_inputs),
            weight_outputs=self._values(program.weight_outputs),
            prepare=None if program.prepare is None else self._graph(program.prepare),
            prepare_inputs=self._values(program.prepare_inputs),
            prepare_outputs=self._values(program.prepare_outputs),
        )

    def _values(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(map(self._value, values))

    def _value(self, value: Value) -> Value:
        if value.kind in ("sent", "received"):
            return self.equal.values[value]
        if value.kind in _AFTER_PARAMETERS:
            return replace(value, name=self.equal.named[value.name])
        if value.kind == "saved":
            prefix = next((p for p in _PREFIXES if value.name.startswith(p)), "")
            name = value.name.removeprefix(prefix)
            known = self.equal.named if prefix == "whole " else self.names
            return replace(value, name=prefix + known.get(name, name))
        return value

    def _graph(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        built: dict[fx.Node, fx.Node] = {}
        nodes = list(module.graph.nodes)
        used = {self.names[n.name] for n in nodes if n.name in self.names}
        for node in nodes:
            name = self.names.get(node.name)
            if name is None:
                name = self._shifted(node.name)
                while name in used:
                    base, number = split(name)
                    name = f"{base}_{number + 1}"
                used.add(name)
            target = name if node.op == "placeholder" else node.target
            args: Any = fx.map_arg(node.args, built.__getitem__)
            kwargs: Any = fx.map_arg(node.kwargs, built.__getitem__) if node.kwargs else {}
            meta = self._meta(node.meta)
            built[node] = new_node(graph, node.op, target, args, kwargs, name, meta)
        return graph_module(module, graph)

    def _shifted(self, name: str) -> str:
        """A name that a pass generated: numbered after those of the joint graph, or containing
        one."""
        if name.startswith("acc_"):
            gradient, place = split(name.removeprefix("acc_"))
            return f"acc_{self.names.get(gradient, gradient)}_{place}"
        base, number = split(name)
        more = self.shifts.get(base, 0)
        return f"{base}_{number + more}" if more else name

    def _meta(self, known: Mapping[str, Any]) -> dict[str, Any]:
        meta = dict(known)
        if "module" in meta:
            meta["module"] = self.equal.modules.get(meta["module"], meta["module"])
        if "origin" in meta:
            meta["origin"] = self.origins.get(meta["origin"], meta["origin"])
        stack = meta.pop("nn_module_stack", None)
        if id(stack) in self.stacks:
            meta["nn_module_stack"] = self.stacks[id(stack)]
        return meta
