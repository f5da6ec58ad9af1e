"""A step seen by the planner: a line of positions, with seconds and bytes at each.

A position is a node of the forward graph. Every joint node lies at the position of its origin, so a
stage, which is a range of positions, owns a forward and a backward part. `Profile` holds what does
not depend on sizes, `SizedProfile` the numbers for one microbatch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import getitem
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from graphaccel.capture.blocks import block_of
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.planner.cluster import Device
from graphaccel.planner.cost import Sizes, dims_of, first_input, is_view, node_work
from graphaccel.planner.efficiency import gap_seconds, seconds_of
from graphaccel.planner.wires import KINDS, Wires
from graphaccel.rules.propagate import is_random

_HELD = ("parameter", "buffer", "tangent")  # what one stage has and others do not


@dataclass(eq=False)
class Storage:
    """One tensor's memory, views folded in, and where it is used.

    made: position. forward, backward: joint-node indices of its uses in each phase, with positions.
    kind: "parameter", "buffer", "constant", "batch", "tangent" of an input, "value" otherwise.
    common: made from batch and constants only, without random numbers, so that every stage that
      needs it makes it for itself.
    """

    index: int
    node: fx.Node
    item: int
    made: int
    at: int
    phase: str
    kind: str = "value"
    name: str = ""
    common: bool = False
    random: bool = False
    floating: bool = False
    forward: list[tuple[int, int]] = field(default_factory=list)
    backward: list[tuple[int, int]] = field(default_factory=list)
    gradient: bool = False

    @property
    def saved(self) -> bool:
        """Made in forward and kept for backward; what is common is made again there instead."""
        return self.owned and bool(self.backward)

    @property
    def owned(self) -> bool:
        """Made in forward by one stage only."""
        return self.kind == "value" and self.phase == "forward" and not self.common


@dataclass(frozen=True)
class Parameter:
    """A parameter: bytes, whether it is trained, and the positions that read it (in forward)."""

    name: str
    bytes: int
    trainable: bool
    positions: tuple[int, ...]


class Profile:
    """Positions, storages, parameters and blocks of a step; sized profiles are kept once made."""

    def __init__(
        self, step: StepGraph, partial: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """partial: parameter → axes besides data over which its gradient is a partial sum."""
        self.step = step
        self.partial = dict(partial or {})
        order = list(step.forward.graph.graph.nodes)
        self.names = tuple(node.name for node in order)
        self.position = {name: i for i, name in enumerate(self.names)}
        self.modules = ["" for _ in order]
        self.nodes = list(step.graph.graph.nodes)
        self.node_position = np.array([self._place(node) for node in self.nodes], dtype=np.int64)
        self.node_forward = np.array([n.meta.get("phase") != "backward" for n in self.nodes])
        for node, at in zip(self.nodes, self.node_position, strict=True):
            self.modules[at] = self.modules[at] or node.meta.get("module", "")
        self.block_names = tuple(block.name for block in step.blocks)
        numbers = {name: i for i, name in enumerate(self.block_names)}
        self.block_at = np.array([numbers.get(block_of(m), -1) for m in self.modules])
        self.storages: list[Storage] = []
        self._roots: dict[tuple[fx.Node, int], Storage] = {}
        self._find_storages()
        self.parameters = self._find_parameters()
        self._sized: dict[Any, SizedProfile] = {}
        self._saved: dict[frozenset[int], tuple[np.ndarray, ...]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def sized(
        self,
        microbatch: int,
        device: Device,
        compute: str = "float32",
        wires: Wires | None = None,
    ) -> SizedProfile:
        """Numbers for `microbatch` examples computed in dtype `compute` on `device`.

        wires: prices of the collectives in the graph, where it has some.
        """
        # memory changes no number here
        key = (microbatch, replace(device, memory=0), compute, wires)
        if key not in self._sized:
            self._sized[key] = SizedProfile(self, microbatch, device, compute, wires)
        return self._sized[key]

    def _place(self, node: fx.Node) -> int:
        origin = node.meta.get("origin", "")
        if origin in self.position:
            return self.position[origin]
        return len(self.names) - 1 if node.meta.get("phase") == "backward" else 0

    def _find_storages(self) -> None:
        """One storage per tensor made; uses of a view are uses of what it is a view of."""
        step = self.step
        specs = dict(zip(step.graph.graph.find_nodes(op="placeholder"), step.inputs, strict=True))
        outputs = cast(tuple[fx.Node, ...], step.graph.graph.output_node().args[0])
        bound: set[fx.Node] = set()
        for index, node in enumerate(self.nodes):
            if node.op == "output":
                break
            inputs = node.all_input_nodes
            kind = specs[node].kind if node in specs else "value"
            random = is_random(node)
            if random or kind in _HELD or any(n in bound for n in inputs):
                bound.add(node)
            for source in inputs:
                if not is_view(node):
                    for storage in self.roots(source):
                        uses = storage.forward if self.node_forward[index] else storage.backward
                        uses.append((index, int(self.node_position[index])))
            if is_view(node):
                continue
            values = node.meta.get("val")
            several = isinstance(values, (tuple, list))
            for item, value in enumerate(values if several else [values]):
                if not isinstance(value, torch.Tensor):
                    continue
                storage = Storage(
                    index=len(self.storages),
                    node=node,
                    item=item if several else -1,
                    made=index,
                    at=int(self.node_position[index]),
                    phase="forward" if self.node_forward[index] else "backward",
                    kind=kind,
                    name=specs[node].name if node in specs else node.name,
                    common=node not in bound,
                    random=random,
                    floating=value.is_floating_point(),
                )
                self.storages.append(storage)
                self._roots[node, storage.item] = storage
        for spec, node in zip(step.outputs, outputs, strict=True):
            for storage in self.roots(node):
                storage.gradient = storage.gradient or spec.kind == "gradient"

    def roots(self, node: fx.Node) -> list[Storage]:
        """The storages behind a node's result."""
        if is_view(node):
            source = first_input(node)
            if node.target is getitem and not is_view(source):
                return [self._roots[source, cast(int, node.args[1])]]
            return self.roots(source)
        items = [-1, *range(len(node.meta["val"]))] if _several(node) else [-1]
        return [self._roots[node, item] for item in items if (node, item) in self._roots]

    @cached_property
    def node_weight(self) -> np.ndarray:
        """Whether a node makes the gradient of one parameter and nothing else: what a schedule that
        has weights apart can do later (`passes.split_weights` decides by the cuts)."""
        made = cast(tuple[fx.Node, ...], self.step.graph.graph.output_node().args[0])
        reached: dict[fx.Node, set[str]] = {}
        for node, spec in zip(made, self.step.outputs, strict=True):
            reached.setdefault(node, set()).add(spec.name if spec.kind == "gradient" else "")
        found = np.zeros(len(self.nodes), dtype=bool)
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            own = reached.get(node, set())
            found[index] = not self.node_forward[index] and len(own) == 1 and "" not in own
            for source in node.all_input_nodes:
                theirs = reached.setdefault(source, set())
                if len(theirs) < 2:
                    theirs |= own
        return found

    @cached_property
    def alike(self) -> tuple[np.ndarray, list[fx.Node]]:
        """For each node the number of its kind, and the first node of each kind: nodes of a kind
        ask the same of a device at any size."""
        numbers: dict[Any, int] = {}
        first: list[fx.Node] = []
        kinds = np.zeros(len(self.nodes), dtype=np.int64)
        for place, node in enumerate(self.nodes):
            key = _asked(node)
            if key not in numbers:
                numbers[key] = len(first)
                first.append(node)
            kinds[place] = numbers[key]
        return kinds, first

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of trained parameters."""
        return sum(p.bytes for p in self.parameters if p.trainable)

    @cached_property
    def resting(self) -> frozenset[str]:
        """Names of the parameters, buffers left out."""
        return frozenset(s.name for s in self.step.inputs if s.kind == "parameter")

    def _find_parameters(self) -> tuple[Parameter, ...]:
        step = self.step
        found: dict[str, Parameter] = {}
        for storage in self.storages:
            if storage.kind not in ("parameter", "buffer"):
                continue
            name = step.tied.get(storage.name, storage.name)
            value = storage.node.meta["val"]
            known = found.get(name)
            positions = {p for _, p in storage.forward} | set(known.positions if known else ())
            trainable = storage.kind == "parameter" and storage.name in step.trainable
            size = value.numel() * value.element_size()
            found[name] = Parameter(name, size, trainable, tuple(sorted(positions)))
        return tuple(found.values())

    def saved(self, recomputed: Iterable[int]) -> tuple[np.ndarray, ...]:
        """What backward finds in memory when some blocks (numbers) are computed again.

        (storage numbers, positions) of what is saved, (storage numbers, positions) of what is made
        again. Saved: what backward reads, unless it was made inside a recomputed block and nobody
        outside that block wants it; what random ops made there; what enters a recomputed block.
        """
        chosen = frozenset(recomputed)
        if chosen not in self._saved:
            kept: list[tuple[int, int]] = []
            again: list[tuple[int, int]] = []
            for storage in self.storages:
                if not storage.owned:
                    continue
                own = self.block_at[storage.at]
                entered = [p for _, p in storage.forward if self.block_at[p] in chosen]
                backward = [p for _, p in storage.backward]
                if own in chosen and not storage.random:
                    outside = [p for p in (*entered, *backward) if self.block_at[p] != own]
                    if outside:
                        kept.append((storage.index, min(outside)))
                    elif backward:
                        again.append((storage.index, min(backward)))
                elif wanted := (*entered, *backward):
                    kept.append((storage.index, min(wanted)))
            columns = [np.array(rows, dtype=np.int64).reshape(-1, 2).T for rows in (kept, again)]
            self._saved[chosen] = (*columns[0], *columns[1])
        return self._saved[chosen]

    @cached_property
    def crossing(self) -> list[tuple[Storage, np.ndarray]]:
        """Values a cut may separate from a use: (storage, positions of its uses, ascending)."""
        found = []
        for storage in self.storages:
            if not storage.owned or self._of_parameters(storage.node):
                continue
            positions = sorted({p for _, p in storage.forward})
            if positions and positions[-1] > storage.at:
                found.append((storage, np.array(positions)))
        return found

    @cached_property
    def _batch_made(self) -> set[fx.Node]:
        """Nodes that depend on the batch."""
        specs = zip(
            self.step.graph.graph.find_nodes(op="placeholder"), self.step.inputs, strict=True
        )
        made = {node for node, spec in specs if spec.kind == "batch"}
        for node in self.nodes:
            if any(n in made for n in node.all_input_nodes):
                made.add(node)
        return made

    def _of_parameters(self, node: fx.Node) -> bool:
        """A cast or copy of one parameter: each stage makes its own."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node.op == "placeholder" and node not in self._batch_made


class SizedProfile:
    """Seconds and bytes per position for one microbatch size, as arrays over the positions.

    forward, backward: seconds of the device; weight: those of the backward that give gradients of
    parameters alone; sent_forward, sent_backward: those of collectives
    among them; host_forward, host_backward: seconds in which the process starts the ops, which goes
    on beside the device. launches: seconds of the device that starting ops takes. bytes: of each
    storage.
    gradients: bytes of parameters' gradients, where they are made. passing_forward,
    passing_backward: the most bytes of values that live only within a phase, while the position
    computes.
    """

    def __init__(
        self,
        profile: Profile,
        microbatch: int,
        device: Device,
        compute: str,
        wires: Wires | None = None,
    ) -> None:
        step, length = profile.step, len(profile)
        sizes: Mapping = {**step.sizes, **({BATCH: microbatch} if BATCH in step.sizes else {})}
        resolve = Sizes(sizes)
        narrow = compute in ("bfloat16", "float16")
        kind, first = profile.alike
        works = [node_work(n, resolve, narrow) for n in first]
        moves = np.array([n.target in KINDS for n in first])
        sent = np.zeros(len(first))
        if wires is not None:
            sent = np.array([wires.seconds(n, resolve, narrow) for n in first])
        calls = np.where(moves, sent > 0, [w.calls for w in works])
        gap = gap_seconds(device)
        alone = np.where(moves, 0.0, [seconds_of(w, device, compute) + gap * w.calls
                                      for w in works])  # fmt: skip
        sent, calls, seconds = sent[kind], calls[kind], (alone + sent)[kind]
        self.launches = gap * float(calls.sum())
        place, ahead = profile.node_position, profile.node_forward
        starting = device.launch_seconds * calls

        def summed(values: np.ndarray, here: np.ndarray) -> np.ndarray:
            return np.bincount(place[here], values[here], minlength=length)

        self.sent_forward, self.sent_backward = summed(sent, ahead), summed(sent, ~ahead)
        self.forward, self.backward = summed(seconds, ahead), summed(seconds, ~ahead)
        self.host_forward, self.host_backward = summed(starting, ahead), summed(starting, ~ahead)
        self.weight = summed(seconds, profile.node_weight)
        self.bytes = np.array(
            [_bytes(s, resolve, narrow) for s in profile.storages], dtype=np.int64
        )
        self._profile = profile
        live = self._passing()
        self.passing_forward = np.zeros(length, dtype=np.int64)
        self.passing_backward = np.zeros(length, dtype=np.int64)
        np.maximum.at(self.passing_forward, place[ahead], live[ahead])
        np.maximum.at(self.passing_backward, place[~ahead], live[~ahead])
        made = [s for s in profile.storages if s.gradient]
        self.gradients = np.bincount(
            [s.at for s in made], [self.bytes[s.index] for s in made], minlength=length
        ).astype(np.int64)
        self.batch_bytes = sum(
            int(self.bytes[s.index]) for s in profile.storages if s.kind in ("batch", "tangent")
        )

    @cached_property
    def work(self) -> float:
        """Seconds of a microbatch, forward and backward."""
        return float(self.forward.sum() + self.backward.sum())

    def _passing(self) -> np.ndarray:
        """Bytes alive at each joint node, without inputs and what is saved for backward.

        A gradient of a parameter counts while it is made only; afterwards it is in its accumulator.
        """
        change = np.zeros(len(self._profile.nodes) + 1, dtype=np.int64)
        for storage in self._profile.storages:
            if storage.kind != "value" or storage.saved:
                continue
            uses = storage.forward if storage.common else storage.backward or storage.forward
            last = storage.made if storage.gradient or not uses else uses[-1][0]
            change[storage.made] += self.bytes[storage.index]
            change[last + 1] -= self.bytes[storage.index]
        return np.cumsum(change)[:-1] - self._let_go()

    def _let_go(self) -> np.ndarray:
        """Bytes of what was saved that a position's backward has read for the last time, at each
        joint node: a loss computed by shards is many nodes at one position."""
        profile, gone = self._profile, np.zeros(len(self._profile.nodes), dtype=np.int64)
        places = profile.node_position
        for storage in profile.storages:
            if not storage.saved:
                continue
            last, at = storage.backward[-1]
            if at == min(p for _, p in storage.backward):
                gone[last + 1 :][places[last + 1 :] == at] += self.bytes[storage.index]
        return gone

    def saved(self, recomputed: Iterable[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per position that wait for backward, and that are made again for it."""
        kept, kept_at, again, again_at = self._profile.saved(recomputed)
        length = len(self._profile)
        return (
            np.bincount(kept_at, self.bytes[kept], minlength=length).astype(np.int64),
            np.bincount(again_at, self.bytes[again], minlength=length).astype(np.int64),
        )

    def block_seconds(self) -> np.ndarray:
        """Forward seconds of each block: what computing it again costs."""
        block = self._profile.block_at
        inside = block >= 0
        return np.bincount(
            block[inside], self.forward[inside], minlength=len(self._profile.block_names)
        )


def _asked(node: fx.Node) -> Any:
    """What a node's cost depends on: its call, with sizes and dtypes in place of values."""
    if node.op != "call_function" or is_view(node):
        return None
    order = {n: i for i, n in enumerate(node.all_input_nodes)}

    def told(value: Any) -> Any:
        if isinstance(value, fx.Node):
            within = first_input(value) if value.target is torch.ops.aten.expand.default else value
            return order[value], *_sized(value), within.meta.get("dims")
        if isinstance(value, (list, tuple)):
            return tuple(told(v) for v in value)
        return str(value)

    given = (*node.args, *node.kwargs.values())
    return node.target, tuple(told(v) for v in given), *_sized(node)


def _sized(node: fx.Node) -> tuple[Any, str]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return node.meta.get("dims"), " ".join(str(getattr(v, "dtype", "")) for v in values)


def _several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _bytes(storage: Storage, sizes: Sizes, narrow: bool) -> int:
    dims: Any = dims_of(storage.node, sizes)
    value = storage.node.meta["val"]
    if storage.item >= 0:
        dims, value = dims[storage.item], value[storage.item]
    width = value.element_size()
    if narrow and value.dtype == torch.float32 and storage.kind == "value":
        width = 2
    return int(np.prod(dims, dtype=np.int64)) * width
