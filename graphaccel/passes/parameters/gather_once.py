"""All-gather ZeRO-3 sharded parameters once a step, and hold them for all its microbatches.

before (forward and backward of w [64, 32])    after (two ranks; w is held as [32, 32])
  %w: f32[64,32] = input                         prepare, once a step, before the first microbatch:
  %c: bf16[64,32] = aten._to_copy(%w)              %shards: f32[1024] = input
  %y: = aten.mm(%x, %c)                            %low: bf16[1024] = aten._to_copy(%shards)
                                                   %own: bf16[32,32] = aten.view(%low, [32, 32])
                                                   %all: = all_gather_..._coalesced([%own], 2)
                                                   return (%all[0])
                                                 each microbatch:
                                                   %w: bf16[64,32] = input
                                                   %here: bf16[64,32] = wait_tensor(%w)
                                                   %y: = aten.mm(%x, %here)

All all-gathers are issued at once, one per group of parameters
(`passes.parameters.parameter_groups`), in the order in which the forward reads them; a microbatch
waits for a group where it first reads it, so that the first microbatch computes while the later
groups are in flight, and the others find all of them complete. A parameter that every reader casts
to the plan's lower precision is cast before it is gathered, and so once a step. The sharded
parameters are the float32 masters of Megatron-LM's distributed optimizer (Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022; Rajbhandari et al., ZeRO, 2020,
§5.1 with 16-bit weights): sharded together with their gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.program import StageProgram, Value
from graphaccel.passes.parameters.parameter_groups import (
    Group,
    ShardedParameters,
    Uses,
    casts_to,
    placeholders_of,
    whole_of,
)
from graphaccel.planner.plan.plan import Plan

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def gather_once(program: StageProgram, plan: Plan, sharded: ShardedParameters) -> StageProgram:
    """The program whose microbatches read "held" parameters, which its `prepare` graph makes of
    "shards". Without a backward, or without parameters that are sharded, it is unchanged."""
    names, groups = sharded.groups_of(program, plan.bucket_bytes)
    if not names or not program.backward_outputs:
        return program
    forward = _Phase(program.forward, program.forward_inputs, names)
    (graph,) = program.backwards.values()
    backward = _Phase(graph, program.backward_inputs, names)
    phases = (forward, backward)
    read = {n for n in names if any(phase.uses.users(n) for phase in phases)}
    wanted = [(g, [n for n in g if n in read]) for g in groups if read & set(g)]
    wanted.sort(key=lambda pair: min(map(forward.uses.first, pair[1])))
    low = getattr(torch, plan.precision.compute) if plan.gathers_low else None
    built = _Prepare(program.forward, sharded)
    for group, members in wanted:
        casts = low is not None and all(p.casts(n, low) for p in phases for n in members)
        built.gather(group, members, low if casts else None)
    prepare = built.finish()
    waited: set[str] = set()
    for phase in phases:
        for _, members in wanted:
            here = [n for n in members if phase.uses.users(n)]
            if here:
                phase.read(here, built.whole, built.sent - waited)
                waited |= set(here)
    return replace(
        program,
        forward_inputs=forward.finish(),
        backward_inputs=backward.finish(),
        groups=tuple(groups),
        prepare=prepare,
        prepare_inputs=tuple(Value("shards", group[0]) for group, _ in wanted),
        prepare_outputs=tuple(Value("held", name) for name in built.whole),
    )


class _Prepare:
    """Builds the graph that runs once a step. whole: parameter → its fake value there. sent: those
    that are returned while their all-gather is in flight."""

    def __init__(self, module: fx.GraphModule, sharded: ShardedParameters) -> None:
        self.module = module
        self.owned, self.values, self.ranks = sharded.owned, sharded.values, sharded.ranks
        self.graph = fx.Graph()
        self.flats: list[fx.Node] = []
        self.full: dict[str, fx.Node] = {}
        self.whole: dict[str, torch.Tensor] = {}
        self.sent: set[str] = set()

    def gather(self, group: Group, members: Sequence[str], low: torch.dtype | None) -> None:
        """Issue the all-gathers of a group's `members`, as one collective."""
        sizes = {n: prod(self._local(n)) for n in group}
        flat = self._input(group, sum(sizes.values()))
        self._about(flat, group[0])
        if low is not None:
            flat = self._call(aten._to_copy.default, flat, dtype=low)
            self._about(flat, members[0])
        starts = {n: sum(list(sizes.values())[:i]) for i, n in enumerate(group)}
        own = []
        for name in members:
            part = self._call(aten.narrow.default, flat, 0, starts[name], sizes[name])
            own.append(self._call(aten.view.default, part, list(self._local(name))))
            self._about(part, name)
            self._about(own[-1], name)
        like = [node.meta["val"] for node in own]
        whole = [v.new_empty((v.shape[0] * self.ranks, *v.shape[1:])) for v in like]
        arguments = (own, self.ranks, self.owned[group[0]].split.axis)
        sent = self._node(c10d.all_gather_into_tensor_coalesced.default, arguments, whole)
        self._about(sent, members[0])
        for place, name in enumerate(members):
            self.full[name] = self._node(getitem, (sent, place), whole[place], name="whole")
            self._about(self.full[name], name)

    def finish(self) -> fx.GraphModule:
        """The graph, which returns the parameters in the order in which they were gathered. One
        that is sharded on another dim than the first has to arrive before it can be laid out."""
        for name, node in self.full.items():
            if self.owned[name].split.dim > 0:
                self.full[name] = self._laid_out(name, node)
            else:
                self.sent.add(name)
            self.whole[name] = self.full[name].meta["val"]
        self.graph.output([*self.full.values()])
        self.graph.lint()
        return graph_module(self.module, self.graph)

    def _laid_out(self, name: str, node: fx.Node) -> fx.Node:
        dim, local, shape = self.owned[name].split.dim, self._local(name), self.values[name].shape
        here = self._node(c10d.wait_tensor.default, (node,), node.meta["val"])
        self._about(here, name)
        for target, args, kwargs in whole_of(shape, local, self.ranks, dim):
            here = self._call(target, here, *args, **kwargs)
            self._about(here, name)
        return here

    def _local(self, name: str) -> tuple[int, ...]:
        return self.owned[name].split.local(self.values[name].shape, self.ranks)

    def _input(self, group: Group, count: int) -> fx.Node:
        after = self.flats[-1].next if self.flats else next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(after):
            node = self.graph.placeholder(f"shards_{len(self.flats)}")
        node.meta = {"val": self.values[group[0]].new_empty(count), "phase": "input"}
        self.flats.append(node)
        return node

    def _call(self, target: Any, source: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        value = target(source.meta["val"], *args, **kwargs)
        return self._node(target, (source, *args), value, kwargs)

    def _node(
        self, target: Any, args: tuple, value: Any, kwargs: Any = None, name: str | None = None
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name)
        node.meta = {"val": value, "phase": "forward", "made_by": "gather_once"}
        return node

    def _about(self, node: fx.Node, name: str) -> None:
        node.meta["module"] = name.rpartition(".")[0]


class _Phase:
    """One graph of a microbatch, rewritten in place. names: parameters that will be held."""

    def __init__(
        self, module: fx.GraphModule, values: Sequence[Value], names: Collection[str]
    ) -> None:
        self.module, self.values = module, values
        self.nodes = placeholders_of(module, values, names)
        self.uses = Uses(module, self.nodes)
        self.held: set[str] = set()

    def casts(self, name: str, low: torch.dtype) -> bool:
        """Whether every read of a parameter is a cast to `low`."""
        return all(casts_to(user, low) for user in self.uses.users(name))

    def read(
        self, names: Sequence[str], whole: Mapping[str, torch.Tensor], waiting: Collection[str]
    ) -> None:
        """Read the parameters `names`, a group, from held values. waiting: those possibly in
        flight."""
        order = self.uses.position
        reads = {n: self.uses.users(n) for n in names}
        first = min((u for users in reads.values() for u in users), key=order.__getitem__)
        casts = []
        for name, users in reads.items():
            node = here = self.nodes[name]
            lower, shape = node.meta["val"].dtype != whole[name].dtype, node.meta["val"].shape
            node.meta = {**node.meta, "val": whole[name]}
            if name in waiting:
                with self.module.graph.inserting_before(first):
                    here = self.module.graph.call_function(c10d.wait_tensor.default, (node,))
                here.meta = {k: first.meta[k] for k in ("phase", "module") if k in first.meta}
                here.meta |= {"val": whole[name], "made_by": "gather_once"}
            if shape != whole[name].shape:  # gathered with its padding
                here = self._narrowed(first, here, shape[0])
            for user in users:
                if lower:
                    user.replace_all_uses_with(here)
                    casts.append(user)
                else:
                    user.replace_input_with(node, here)
        for cast in casts:
            self.module.graph.erase_node(cast)
        self.held |= set(names)

    def _narrowed(self, before: fx.Node, node: fx.Node, size: int) -> fx.Node:
        with self.module.graph.inserting_before(before):
            here = self.module.graph.call_function(aten.narrow.default, (node, 0, 0, size))
        here.meta = {k: before.meta[k] for k in ("phase", "module") if k in before.meta}
        value = node.meta["val"].narrow(0, 0, size)
        here.meta |= {"val": value, "made_by": "gather_once"}
        return here

    def finish(self) -> tuple[Value, ...]:
        """The graph's inputs."""
        self.module.graph.lint()
        self.module.recompile()
        return tuple(
            Value("held", v.name) if v.kind == "parameter" and v.name in self.held else v
            for v in self.values
        )
