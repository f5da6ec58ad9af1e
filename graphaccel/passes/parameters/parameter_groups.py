"""Group the sharded parameters that one block reads into one flat buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.ir.program import Owned, StageProgram, Value

aten = torch.ops.aten
Group: TypeAlias = tuple[str, ...]


def parameter_groups(
    program: StageProgram, names: Sequence[str], shared: Collection[str], size: int
) -> list[Group]:
    """Parameters by the block that reads them; outside blocks, groups of at most `size` bytes;
    parameters that several blocks read alone; those that nothing reads last."""
    nodes = placeholders_of(program.forward, program.forward_inputs, names)
    uses = Uses(program.forward, nodes)
    built: dict[Any, list[str]] = defaultdict(list)
    filled: dict[Any, int] = defaultdict(int)
    parts: dict[Any, int] = defaultdict(int)
    for name in sorted(nodes, key=lambda n: uses.first(n)):
        value = nodes[name].meta["val"]
        segments = uses.segments(name)
        if len(segments) > 1 or name in shared:
            built["alone", name].append(name)
            continue
        (segment,) = segments
        key = (segment, value.dtype)
        count = value.numel() * value.element_size()
        if not uses.block(segment) and filled[key] and filled[key] + count > size:
            parts[key] += 1
            filled[key] = 0
        filled[key] += count
        built[("block", *key, parts[key])].append(name)
    for name in names:  # read by the backward alone, or never
        if name not in nodes:
            built["alone", name].append(name)
    return [tuple(group) for group in built.values()]


@dataclass(frozen=True)
class ShardedParameters:
    """The parameters of all programs and how ZeRO shards them.

    owned: by name, those that ZeRO shards anything of. ranks: over which it shards. values: fake
    parameters as the graph reads them, by name. shared: parameters that several stages hold.
    groups: those of the first program, where parameters are already stored.
    """

    owned: Mapping[str, Owned]
    ranks: int
    values: Mapping[str, torch.Tensor]
    shared: Collection[str] = ()
    groups: Sequence[Group] | None = None

    def groups_of(self, program: StageProgram, size: int) -> tuple[list[str], list[Group]]:
        """The parameters of a program that are sharded between uses (ZeRO 3), and their groups of
        at most `size` bytes outside blocks."""
        names = [n for n in program.parameters if n in self.owned and self.owned[n].level == 3]
        if not names:
            return [], []
        if self.groups is None:
            return names, parameter_groups(program, names, self.shared, size)
        return names, [group for group in self.groups if set(group) <= set(names)]


@dataclass
class Uses:
    """Where a graph reads parameters. nodes: their placeholders by name.

    A segment is a run of nodes that read parameters within one block, or outside any.
    """

    graph: fx.GraphModule
    nodes: Mapping[str, fx.Node]
    position: dict[fx.Node, int] = field(default_factory=dict)
    segment: dict[fx.Node, int] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = set(self.nodes.values())
        for index, node in enumerate(self.graph.graph.nodes):
            self.position[node] = index
            if node.op != "placeholder" and any(n in known for n in node.all_input_nodes):
                block = block_of(node.meta.get("module", ""))
                if not self.blocks or self.blocks[-1] != block:
                    self.blocks.append(block)
                self.segment[node] = len(self.blocks) - 1

    def users(self, name: str) -> list[fx.Node]:
        """The nodes that read a parameter, in order."""
        node = self.nodes.get(name)
        users = [] if node is None else [u for u in node.users if u in self.segment]
        return sorted(users, key=self.position.__getitem__)

    def first(self, name: str) -> int:
        """Position of the first of them; past the end for a parameter without readers."""
        users = self.users(name)
        return self.position[users[0]] if users else len(self.position)

    def segments(self, name: str) -> set[int]:
        """The segments that read a parameter; one past the last if there are none."""
        return {self.segment[u] for u in self.users(name)} or {len(self.blocks)}

    def block(self, segment: int) -> str:
        """The block that contains a segment; empty outside."""
        return self.blocks[segment] if segment < len(self.blocks) else ""


def whole_of(
    shape: Sequence[int], local: Sequence[int], ranks: int, dim: int, *, apart: bool = False
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The calls that build a full parameter from the shards of all ranks, one after another in
    memory: each on the result of the one before, with its other arguments.

    shape, local: of the full parameter and of a shard. dim: the sharded dim; padding is cut off its
    end. apart: the shards are not adjacent in memory.
    """
    padded = [*shape[:dim], local[dim] * ranks, *shape[dim + 1 :]]
    built: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    if dim > 0:
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
        built += [(aten.view.default, ([ranks, *local],), {}), (aten.permute.default, (order,), {})]
    if apart or dim > 0:
        built.append((aten.clone.default, (), {"memory_format": torch.contiguous_format}))
    built.append((aten.view.default, (padded,), {}))
    if padded != [*shape]:
        built.append((aten.narrow.default, (dim, 0, shape[dim]), {}))
        built += [(aten.contiguous.default, (), {})] if dim > 0 else []
    return built


def casts_to(user: fx.Node, dtype: torch.dtype | None) -> bool:
    """Whether a call only casts to `dtype`."""
    return user.target is aten._to_copy.default and dict(user.kwargs) == {"dtype": dtype}


def placeholders_of(
    module: fx.GraphModule, values: Sequence[Value], names: Collection[str]
) -> dict[str, fx.Node]:
    """Parameters among `names` → their placeholders in a graph whose inputs are `values`."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    return {
        v.name: n
        for n, v in zip(nodes, values, strict=True)
        if v.kind == "parameter" and v.name in names
    }
