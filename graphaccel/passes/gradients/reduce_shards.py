"""Reduce-scatter the gradients that ZeRO shards, so that each data rank gets its own shard.

before                                    after (two ranks, one microbatch; w [64, 32])
  %g: f32[64,32] = aten.mm(%a, %b)          %flat: f32[2048] = aten.empty
  ...                                       %g: f32[64,32] = aten.mm(%a, %b)
  return (%g)                               %copy_: = aten.copy_(%flat_w, %g)
                                            %own: f32[1024] = reduce_scatter_tensor(%flat, 2)
                                            ... until the next one is issued ...
                                            %here: f32[1024] = wait_tensor(%own)
                                            return (%here)

Groups are those in which the parameters are stored, or, for parameters that are replicated, buckets
in the order in which gradients are ready. A gradient is written into its group's flat tensor where
it is computed, one rank's shard after another; the reduce-scatter starts when the group is complete
and is waited for when the next one starts. With several microbatches there are two ways
(`Plan.accumulation`): "whole" accumulates them in the flat tensor and reduces it once, "shards"
reduces in every microbatch and accumulates the shards, for 1/N of the memory and as many times the
traffic. Where only a part of the data axis shards, replicas of a shard are summed in the last
microbatch: an all-reduce of the shard, issued when its reduce-scatter has finished and waited for
when that of the next group has. Rajbhandari et al., ZeRO, 2020, §5.2. This pass runs last: it
introduces in-place ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.nodes import copy_nodes
from graphaccel.ir.program import Owned, StageProgram, Value
from graphaccel.ir.values import returned
from graphaccel.planner.estimate.gradient_buckets import bucket_limit
from graphaccel.planner.plan.plan import Plan

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def reduce_shards(
    program: StageProgram,
    plan: Plan,
    owned: Mapping[str, Owned],
    partial: Mapping[str, tuple[str, ...]] | None = None,
) -> StageProgram:
    """The program whose outputs "shard" (full gradients) have become "carried" (flat shards).

    partial: parameter → axes besides data over which its gradient is still a partial sum: its
    shard is summed over them in the last microbatch.
    """
    names = [v.name for v in program.backward_outputs if v.kind == "shard"]
    if not names:
        return program
    base = next(iter(program.backwards.values()))
    groups = _groups(program, base, plan, owned, names)
    last = plan.microbatches - 1
    moments = {(m == 0, m == last) for m in range(plan.microbatches)}
    seen: dict[Any, Any] = {}
    graphs = {}
    for moment in moments:
        before = program.backwards.get(moment, base)
        reducing = _Reducing(before, program, groups, owned, plan, moment, partial or {}, seen)
        graphs[moment] = reducing.build()
    carried = tuple(Value("carried", group[0]) for group in groups)
    kept = tuple(v for v in program.backward_outputs if v.kind != "shard")
    return replace(
        program,
        backwards=graphs,
        backward_inputs=(*program.backward_inputs, *(carried if plan.microbatches > 1 else ())),
        backward_outputs=(*kept, *carried),
        reduced=groups,
    )


def _groups(
    program: StageProgram,
    module: fx.GraphModule,
    plan: Plan,
    owned: Mapping[str, Owned],
    built: Sequence[str],
) -> tuple[tuple[str, ...], ...]:
    """Groups of sharded parameters, without what is frozen; then buckets of the others."""
    results = _results(program, module)
    collected = [tuple(n for n in group if n in results) for group in program.groups]
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    others = sorted((n for n in built if owned[n].level < 3), key=lambda n: order[results[n]])
    sizes = {n: results[n].meta["val"].numel() * results[n].meta["val"].element_size()
             for n in others}  # fmt: skip
    limit = bucket_limit(plan.bucket_bytes, sum(sizes.values()), scattered=True)
    buckets: list[list[str]] = []
    filled, kind = 0, None
    for name in others:
        dtype = results[name].meta["val"].dtype
        if not buckets or dtype != kind or filled + sizes[name] > limit:
            buckets.append([])
            filled, kind = 0, dtype
        buckets[-1].append(name)
        filled += sizes[name]
    return (*(group for group in collected if group), *map(tuple, buckets))


def _results(program: StageProgram, module: fx.GraphModule) -> dict[str, fx.Node]:
    """Parameter → its full gradient."""
    pairs = zip(program.backward_outputs, returned(module), strict=True)
    return {v.name: node for v, node in pairs if v.kind == "shard"}


def _empty(like: Any, count: int) -> Any:
    return like.new_empty(count)


class _Reducing:
    """Builds the backward graph of one moment of the step: first, middle or last microbatch."""

    def __init__(
        self,
        module: fx.GraphModule,
        program: StageProgram,
        groups: Sequence[tuple[str, ...]],
        owned: Mapping[str, Owned],
        plan: Plan,
        moment: tuple[bool, bool],
        partial: Mapping[str, tuple[str, ...]],
        seen: dict[Any, Any],
    ) -> None:
        """seen: values by (op, value, arguments), reused because layers are identical."""
        self.partial, self.seen = partial, seen
        self.module, self.program, self.groups, self.owned = module, program, groups, owned
        self.ranks, self.first, self.last = plan.shards, *moment
        self.others = ("replicate",) if plan.num_replicas > 1 else ()
        self.in_flight: list[fx.Node] = []
        self.single = plan.microbatches == 1
        self.whole = not self.single and plan.accumulation == "whole"
        self.graph = fx.Graph()
        self.sizes: dict[str, int] = {}

    def build(self) -> fx.GraphModule:
        """The rewritten graph."""
        built: dict[fx.Node, fx.Node] = {}
        results = copy_nodes(self.graph, self.module.graph, built)
        self.graph.output(results)
        own = {n: built[node] for n, node in _results(self.program, self.module).items()}
        self.sizes = {n: prod(self._local(n, node.meta["val"])) for n, node in own.items()}
        carried = self._inputs(own)
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        ready = {g: max((own[n] for n in g), key=order.__getitem__) for g in self.groups}
        outputs: dict[tuple[str, ...], fx.Node] = {}
        pending: tuple[tuple[str, ...], fx.Node] | None = None
        for group in sorted(self.groups, key=lambda g: order[ready[g]]):
            flat, newest = self._write(group, own, carried.get(group))
            if self.whole and not self.last:
                outputs[group] = flat
                continue
            sent = self._issue(flat, newest, self.owned[group[0]].split.axis)
            if pending is not None:
                outputs[pending[0]] = self._wait(*pending, carried, sent.next)
            pending = (group, sent)
        if pending is not None:
            outputs[pending[0]] = self._wait(*pending, carried, self.graph.output_node())
        self._land(self.graph.output_node())
        kept = [
            n for n, v in zip(results, self.program.backward_outputs, strict=True)
            if v.kind != "shard"
        ]  # fmt: skip
        self.graph.output_node().args = ([*kept, *(outputs[g] for g in self.groups)],)
        new = graph_module(self.module, self.graph)
        new.graph.lint()
        return new

    def _inputs(self, own: Mapping[str, fx.Node]) -> dict[tuple[str, ...], fx.Node]:
        """Placeholders of what the microbatch before left; the first microbatch has none."""
        collected: dict[tuple[str, ...], fx.Node] = {}
        if self.single:
            return collected
        body = next(n for n in self.graph.nodes if n.op != "placeholder")
        for index, group in enumerate(self.groups):
            value = own[group[0]].meta["val"]
            count = self._count(group) * (self.ranks if self.whole else 1)
            with self.graph.inserting_before(body):
                node = self.graph.placeholder(f"carried_{index}")
            node.meta = {"val": value.new_empty(count), "phase": "input"}
            if not self.first:
                collected[group] = node
        return collected

    def _count(self, group: tuple[str, ...]) -> int:
        return sum(self.sizes[n] for n in group)

    def _local(self, name: str, whole: torch.Tensor) -> tuple[int, ...]:
        return self.owned[name].split.local(whole.shape, self.ranks)

    def _write(
        self, group: tuple[str, ...], own: Mapping[str, fx.Node], carried: fx.Node | None
    ) -> tuple[fx.Node, fx.Node]:
        """Write each gradient to its place: (the flat tensor, the last of the writes)."""
        start = min(own[n] for n in group)
        count = self._count(group)
        adding = self.whole and carried is not None
        if adding:
            assert carried is not None
            flat = carried
        else:
            like = own[group[0]].meta["val"]
            kwargs = {"dtype": like.dtype, "device": like.device}
            value = self._value(_empty, like, count * self.ranks)
            flat = self._call(self._after(start), aten.empty.memory_format,
                              ([count * self.ranks],), value, kwargs)  # fmt: skip
        newest, offset = flat, 0
        places = {}
        for name in group:
            places[name] = offset
            offset += self.sizes[name]
        target = aten.add_.Tensor if adding else aten.copy_.default
        for name in sorted(group, key=own.__getitem__):
            at = self._after(max(own[name], flat))
            written = self._put(target, flat, own[name], places[name], count, name, at)
            newest = max(newest, written)  # values that are inputs are written in reverse order
        return flat, newest

    def _put(
        self, target: Any, flat: fx.Node, value: fx.Node, place: int, count: int, name: str,
        at: fx.Node,
    ) -> fx.Node:  # fmt: skip
        """Write one gradient, viewed as the shards of all ranks, into theirs in the flat tensor."""
        shape, ranks = list(value.meta["val"].shape), self.ranks
        dim, local = self.owned[name].split.dim, self._local(name, value.meta["val"])
        padding = local[dim] * ranks - shape[dim]

        def call(op: Any, source: fx.Node, *args: Any) -> fx.Node:
            return self._call(at, op, (source, *args), self._value(op, source.meta["val"], *args))

        there = call(aten.view.default, flat, [ranks, count])
        there = call(aten.narrow.default, there, 1, place, self.sizes[name])
        there = call(aten.view.default, there, [ranks, *local])
        if dim > 0:
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
            there = call(aten.permute.default, there, order)
        if padding:
            behind = [0, 0] * (len(shape) - 1 - dim)
            value = call(aten.constant_pad_nd.default, value, [*behind, 0, padding])
        parts = call(aten.view.default, value, [*shape[:dim], ranks, *local[dim:]])
        return self._call(at, target, (there, parts), there.meta["val"])

    def _value(self, op: Any, value: Any, *args: Any) -> Any:
        """op(value, *args), shared between layers that share values."""
        key = (op, id(value), repr(args))
        if key not in self.seen:
            self.seen[key] = (op(value, *args), value)  # `value` too: so its id is not reused
        return self.seen[key][0]

    def _issue(self, flat: fx.Node, newest: fx.Node, axis: str) -> fx.Node:
        value = flat.meta["val"]
        own = self._value(_empty, value, value.numel() // self.ranks)
        args = (flat, "sum", self.ranks, axis)
        return self._call(newest.next, c10d.reduce_scatter_tensor.default, args, own)

    def _wait(
        self,
        group: tuple[str, ...],
        sent: fx.Node,
        carried: Mapping[tuple[str, ...], fx.Node],
        before: fx.Node,
    ) -> fx.Node:
        """The sum; the shards of earlier microbatches are added to it unless they are carried
        whole."""
        self._land(before)
        value = sent.meta["val"]
        here = self._call(before, c10d.wait_tensor.default, (sent,), value)
        if not self.whole and group in carried:
            so_far = carried[group]
            here = self._call(before, aten.add_.Tensor, (so_far, here), so_far.meta["val"])
        if self.last:
            self._sum_over_others(group, here, before)
        return here

    def _sum_over_others(self, group: tuple[str, ...], here: fx.Node, before: fx.Node) -> None:
        """All-reduce neighbours that are partial sums over the same other axes, in place; in flight
        until `_land`."""
        sizes = self.sizes
        pieces: list[list[Any]] = []  # axes, start, length
        offset = 0
        for name in group:
            axes = "+".join((*self.others, *self.partial.get(name, ())))
            if pieces and pieces[-1][0] == axes:
                pieces[-1][2] += sizes[name]
            else:
                pieces.append([axes, offset, sizes[name]])
            offset += sizes[name]
        for axes, start, length in pieces:
            if axes:
                args = (here, 0, start, length)
                value = self._value(aten.narrow.default, here.meta["val"], *args[1:])
                piece = self._call(before, aten.narrow.default, args, value)
                self.in_flight.append(
                    self._call(before, c10d.all_reduce_.default, (piece, "sum", axes), value)
                )

    def _land(self, before: fx.Node) -> None:
        """Wait for the all-reduces in flight."""
        for node in self.in_flight:
            self._call(before, c10d.wait_tensor.default, (node,), node.meta["val"])
        self.in_flight = []

    def _after(self, node: fx.Node) -> fx.Node:
        """The node before which to insert so as to come after `node`, and after all inputs."""
        after = node.next
        while after.op == "placeholder":
            after = after.next
        return after

    def _call(
        self, before: fx.Node, target: Any, args: tuple, value: Any, kwargs: Any = None
    ) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs or {})
        node.meta = {"val": value, "made_by": "reduce_shards", "phase": "backward"}
        if "module" in node.prev.meta:  # that of the gradient computed last
            node.meta["module"] = node.prev.meta["module"]
        return node
