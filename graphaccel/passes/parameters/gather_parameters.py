"""All-gather parameters that ZeRO 3 shards over the data axis, one block ahead of their use.

before                                    after (two ranks; w [64, 32] is held as [32, 32])
  %w: f32[64,32] = input                    %shards: f32[1024] = input
  %y: = aten.mm(%x, %w)                     %all: f32[2048] = all_gather_into_tensor(%shards, 2)
                                            ... what the group before computes ...
                                            %here: f32[2048] = wait_tensor(%all)
                                            %w: f32[64,32] = aten.view(%here, [64, 32])
                                            %y: = aten.mm(%x, %w)

A group is what one block of the model reads, in one flat buffer: one all-gather a block, without a
copy before it. It is issued where the block before starts to compute and waited for at its own
first use; the gathered parameters are freed after their last use, and the backward gathers them a
second time. They are saved for the backward instead in two cases: all of them where the plan does
not reshard after the forward, and on the last stage what follows the last block, since its backward
comes next. A parameter that several blocks read (tied weights) is a group of its own, gathered for
each of them. A group whose readers all cast to one lower precision, and of which nothing is saved,
is cast before it is gathered.
Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, §3.3, 4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from graphaccel.ir.program import Owned, StageProgram, Value
from graphaccel.ir.values import returned
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


def gather_parameters(
    program: StageProgram, plan: Plan, sharded: ShardedParameters, *, last: bool = True
) -> StageProgram:
    """The program that reads flat shards ("shards") instead of the parameters that are sharded.

    last: whether this is the last stage.
    """
    names, groups = sharded.groups_of(program, plan.bucket_bytes)
    if not names:
        return program
    shards = {g: _Shards(g, sharded.owned, sharded.values, sharded.ranks) for g in groups}
    low = getattr(torch, plan.precision.compute) if plan.gathers_low else None
    forward = _Gathering(program.forward, program.forward_inputs, shards, low, keeps_final=last)
    inputs = forward.rewrite()
    program = replace(program, forward_inputs=inputs, groups=tuple(groups))
    if not program.backward_outputs:
        return program
    read = {v.name for v in program.backward_inputs if v.kind == "parameter"}
    kept = [
        n for n in names
        if n in read and n in forward.full
        and (plan.reshard_after_forward == "never" or (last and n in forward.final))
    ]  # fmt: skip
    program = _keep(program, {n: forward.full[n] for n in kept})
    backward = _Gathering(program.backwards[True, True], program.backward_inputs, shards, low)
    return replace(program, backward_inputs=backward.rewrite())


def _keep(program: StageProgram, kept: Mapping[str, fx.Node]) -> StageProgram:
    """Full parameters go from the forward to the backward like any value that the forward saves."""
    if not kept:
        return program
    output = program.forward.graph.output_node()
    output.args = ([*returned(program.forward), *kept.values()],)
    program.forward.recompile()
    saved = {n: Value("saved", f"whole {n}") for n in kept}
    return replace(
        program,
        forward_outputs=(*program.forward_outputs, *saved.values()),
        backward_inputs=tuple(
            saved.get(v.name, v) if v.kind == "parameter" else v for v in program.backward_inputs
        ),
    )


@dataclass(frozen=True)
class _Shards:
    """The flat buffer of a group: one shard after another; once gathered, one rank after
    another."""

    group: Group
    owned: Mapping[str, Owned]
    values: Mapping[str, torch.Tensor]
    ranks: int

    @property
    def axis(self) -> str:
        """The mesh axis over which it is sharded."""
        return self.owned[self.group[0]].split.axis

    @property
    def count(self) -> int:
        """Number of elements in one rank's buffer."""
        return sum(prod(self.local(n)) for n in self.group)

    def local(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter's shard."""
        return self.owned[name].split.local(self.values[name].shape, self.ranks)

    def offset(self, name: str) -> int:
        """The position at which a parameter's shard starts."""
        before = self.group[: self.group.index(name)]
        return sum(prod(self.local(n)) for n in before)


@dataclass
class _Region:
    """A range of a graph for which a group is gathered: its uses, in order. low: the dtype to which
    all of them cast; after a gather in that dtype the casts are not needed."""

    shards: _Shards
    users: list[tuple[fx.Node, str]]
    low: torch.dtype | None = None


class _Gathering:
    """Rewrites one graph in place.

    full: parameter → its full value, from the newest gather. final: parameters read by what follows
    the last block.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: Sequence[Value],
        shards: Mapping[Group, _Shards],
        low: torch.dtype | None,
        *,
        keeps_final: bool = False,
    ) -> None:
        self.module, self.values, self.shards = module, values, shards
        self.low, self.keeps_final = low, keeps_final
        self.nodes = placeholders_of(module, values, [n for group in shards for n in group])
        self.uses = Uses(module, self.nodes)
        self.full: dict[str, fx.Node] = {}
        self.final: set[str] = set()
        blocks = self.uses.blocks
        if blocks and not blocks[-1]:
            read = [n for n in self.nodes if self.uses.users(n)]
            self.final = {n for n in read if max(self.uses.segments(n)) == len(blocks) - 1}

    def rewrite(self) -> tuple[Value, ...]:
        """The graph's new inputs."""
        graph = self.module.graph
        body = next(n for n in graph.nodes if n.op != "placeholder")
        regions = self._regions()
        flats: dict[Group, fx.Node] = {}
        for region in regions:
            group = region.shards.group
            if group not in flats:
                like = region.shards.values[group[0]]
                with graph.inserting_before(body):
                    flats[group] = graph.placeholder(f"shards_{len(flats)}")
                flats[group].meta = {"val": like.new_empty(region.shards.count), "phase": "input"}
        before = body
        issued = []
        for region in regions:  # where the region before starts
            issued.append(self._issue(region, flats[region.shards.group], before))
            before = region.users[0][0]
        for region, gathered in zip(regions, issued, strict=True):
            self._unpack(region, gathered)
        kept = [v for v in self.values if v.kind != "parameter" or v.name not in self.nodes]
        for node in self.nodes.values():
            graph.erase_node(node)
        graph.lint()
        self.module.recompile()
        return (*kept, *(Value("shards", group[0]) for group in flats))

    def _regions(self) -> list[_Region]:
        """The regions in the order in which they start."""
        results = []
        for group, shards in self.shards.items():
            users = [(user, name) for name in group for user in self.uses.users(name)]
            users.sort(key=lambda pair: self.uses.position[pair[0]])
            if len(group) > 1:
                results += [_Region(shards, users)] if users else []
                continue
            parts: dict[int, list[tuple[fx.Node, str]]] = defaultdict(list)
            for user, name in users:  # possibly tied: gathered for each segment that reads it
                parts[self.uses.segment[user]].append((user, name))
            results += [_Region(shards, part) for part in parts.values()]
        results = [replace(region, low=self._cast_to(region)) for region in results]
        return sorted(results, key=lambda region: self.uses.position[region.users[0][0]])

    def _cast_to(self, region: _Region) -> torch.dtype | None:
        end = len(self.uses.blocks) - 1
        kept = self.keeps_final and any(
            name in self.final and self.uses.segment[user] == end for user, name in region.users
        )
        casts = all(casts_to(user, self.low) for user, _ in region.users)
        return self.low if casts and not kept else None

    def _issue(self, region: _Region, flat: fx.Node, before: fx.Node) -> fx.Node:
        ranks = region.shards.ranks
        if region.low is not None:
            cast, kind = aten._to_copy.default, {"dtype": region.low}
            flat = self._call(before, cast, (flat,), flat.meta["val"].to(region.low), kind)
        value = flat.meta["val"]
        whole = value.new_empty(value.numel() * ranks)
        args = (flat, ranks, region.shards.axis)
        return self._call(before, c10d.all_gather_into_tensor.default, args, whole)

    def _unpack(self, region: _Region, issued: fx.Node) -> None:
        """Extract each parameter just before its first use: never two copies of all of them at
        once."""
        first = region.users[0][0]
        whole = issued.meta["val"]
        here = self._call(first, c10d.wait_tensor.default, (issued,), whole)
        built: dict[str, fx.Node] = {}
        for user, name in region.users:
            if name not in built:
                built[name] = self._take(user, here, name, region.shards)
            if region.low is None:
                user.replace_input_with(self.nodes[name], built[name])
            else:
                user.replace_all_uses_with(built[name])
                self.module.graph.erase_node(user)
        self.full |= built

    def _take(self, before: fx.Node, here: fx.Node, name: str, shards: _Shards) -> fx.Node:
        """One full parameter out of the gathered buffer; a view where it is the only one."""
        local, apart = shards.local(name), len(shards.group) > 1

        def call(target: Any, source: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
            value = target(source.meta["val"], *args, **kwargs)
            return self._call(before, target, (source, *args), value, kwargs)

        node = here
        if apart:
            node = call(aten.view.default, node, [shards.ranks, shards.count])
            node = call(aten.narrow.default, node, 1, shards.offset(name), prod(local))
        shape, dim = shards.values[name].shape, shards.owned[name].split.dim
        for target, args, kwargs in whole_of(shape, local, shards.ranks, dim, apart=apart):
            node = call(target, node, *args, **kwargs)
        return node

    def _call(
        self, before: fx.Node, target: Any, args: tuple, value: Any, kwargs: Any = None
    ) -> fx.Node:
        with self.module.graph.inserting_before(before):
            node = self.module.graph.call_function(target, args, kwargs or {})
        node.meta = {k: before.meta[k] for k in ("phase", "module") if k in before.meta}
        node.meta |= {"val": value, "made_by": "gather_parameters"}
        return node
