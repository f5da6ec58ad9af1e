"""Columns of a step over the positions of its forward graph, none of which depends on sizes.

A position is a node of the forward graph. Every joint node has the position of its origin, so a
stage, which is a range of positions, owns a forward and a backward part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.analysis_cache import AnalysisCache
from graphaccel.ir.replication.layers import NotRepeated
from graphaccel.ir.replication.unfold import node_names
from graphaccel.ir.values import operands
from graphaccel.planner.profile.axis_collectives import KINDS
from graphaccel.planner.profile.compiled_traffic import Traffic, compiled_traffic
from graphaccel.planner.profile.cost import (
    RESHAPES,
    TRANSPOSES,
    first_input,
    in_chunks,
    is_view,
    left_readers,
)
from graphaccel.planner.profile.lines import Lines, read_lines, unfolded
from graphaccel.planner.profile.storages import Crossing, Tensor, find_storages

_CAST = torch.ops.aten._to_copy.default
_MM = torch.ops.aten.mm.default
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer: bytes, whether it is trained, the positions that read it (in forward),
    its shape on a device of the layout, and whether the backward reads it too."""

    name: str
    bytes: int
    trainable: bool
    positions: tuple[int, ...]
    shape: tuple[int, ...]
    late: bool = True


def _is_result(node: fx.Node) -> bool:
    """Whether a node is a matmul that one result is a view of, and that nothing else reads."""
    if node.target is not _MM:
        return False
    while len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            return list(operands(user)[0]).count(node) == 1
        if user.target not in RESHAPES and user.target not in TRANSPOSES:
            return False
        node = user
    return False


class StepColumns:
    """Positions, storages, parameters and blocks of a step, at any sizes."""

    def __init__(
        self,
        step: StepGraph,
        partial: Mapping[str, tuple[str, ...]] | None = None,
        lines: Lines | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """partial: parameter → axes besides data over which its gradient is a partial sum. lines:
        of the step's joint graph, where they are known. compiled: Inductor compiles the step for a
        GPU."""
        self.step, self.compiled = step, compiled
        self.partial = dict(partial or {})
        self.names = tuple(node_names(step.forward.graph))
        self.position = {name: i for i, name in enumerate(self.names)}
        self.lines = _lines(step) if lines is None else lines
        self.modules = self.lines.modules
        self.node_position = self.lines.place
        self.node_forward = self.lines.by_row(
            [n.meta.get("phase") != "backward" for n in self.lines.nodes]
        )
        self.block_names = tuple(block.name for block in step.blocks)
        self._number = {name: i for i, name in enumerate(self.block_names)}
        numbers = self._number
        known = {module: numbers.get(block_of(module), -1) for module in set(self.modules)}
        self.block_at = np.array([known[module] for module in self.modules])
        self.tensors, self.storages = find_storages(
            step, self.lines, self.node_position, self.node_forward, self.node_released
        )
        self.parameters = self._find_parameters()
        self.recompute_whole = False
        """Whether recomputing a block repeats all of its forward, as other systems do."""
        self.analyses = AnalysisCache()

    def __len__(self) -> int:
        return len(self.names)

    def numbers(self, blocks: Iterable[str]) -> tuple[int, ...]:
        """Numbers of blocks, by name."""
        return tuple(self._number[name] for name in blocks)

    @cached_property
    def in_chunks(self) -> bool:
        """Whether a fused op of the graph processes its rows in chunks."""
        return any(in_chunks(node) for node in self.lines.nodes)

    @property
    def nodes(self) -> list[fx.Node]:
        """For each row the node that it is, or is a copy of."""
        return [self.lines.nodes[i] for i in self.lines.of.tolist()]

    @cached_property
    def node_weight(self) -> np.ndarray:
        """Whether a node contributes to the gradient of one parameter and nothing else: what a
        schedule with separate weight gradients can run later (`passes.stages.split_weights` decides
        by the cuts)."""
        lines, names = self.lines, {"": -1}
        only = [0] * len(lines.of)  # number of the one parameter; 0: of none, -1: of several
        for row, spec in zip(lines.results.tolist(), self.step.outputs, strict=True):
            name = spec.name if spec.kind == "gradient" else ""
            own = names.setdefault(name, len(names))
            only[row] = own if only[row] in (0, own) else -1
        for reader, source in zip(
            lines.reader[::-1].tolist(), lines.source[::-1].tolist(), strict=True
        ):
            own = only[reader]
            if own and only[source] != own:
                only[source] = -1 if only[source] else own
        return (np.array(only) > 0) & ~self.node_forward

    @cached_property
    def node_kinds(self) -> tuple[np.ndarray, list[fx.Node]]:
        """For each node the number of its kind, and the first node of each kind: nodes of a kind do
        identical work at any size."""
        numbers: dict[Any, int] = {}
        first: list[fx.Node] = []
        kinds = []
        for node in self.lines.nodes:
            key = _asked(node), self.traffic.get(node)
            if key not in numbers:
                numbers[key] = len(first)
                first.append(node)
            kinds.append(numbers[key])
        return self.lines.by_row(kinds), first

    @cached_property
    def traffic(self) -> Mapping[fx.Node, Traffic]:
        """What calls read and write that are compiled into one kernel with others."""
        return compiled_traffic(self.lines.nodes) if self.compiled else {}

    @cached_property
    def storage_kinds(self) -> tuple[np.ndarray, list[Tensor]]:
        """For each storage the number of its kind, and the first tensor of each kind: storages of a
        kind have the same bytes at any size."""
        numbers: dict[Any, int] = {}
        first: list[Tensor] = []
        kinds = []
        for tensor in self.tensors:
            dims = tensor.node.meta.get("dims", ())
            key = dims[tensor.item] if tensor.item >= 0 else dims, tensor.value.element_size()
            if key not in numbers:
                numbers[key] = len(first)
                first.append(tensor)
            kinds.append(numbers[key])
        return np.array(kinds, dtype=np.int64)[self.storages.tensor], first

    @cached_property
    def block_first(self) -> np.ndarray:
        """The first position of each block."""
        return np.array([int((self.block_at == b).argmax()) for b in range(len(self.block_names))])

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of trained parameters."""
        return sum(p.bytes for p in self.parameters if p.trainable)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(p.bytes for p in self.parameters)

    @cached_property
    def trained_tensors(self) -> int:
        """Number of trained parameters."""
        return sum(p.trainable for p in self.parameters)

    @cached_property
    def readers(self) -> tuple[list[int], list[int]]:
        """(number of a parameter, position that reads it), by position; an unused one is at 0."""
        pairs = [(at, i) for i, p in enumerate(self.parameters) for at in p.positions or (0,)]
        pairs.sort()
        return [i for _, i in pairs], [at for at, _ in pairs]

    def read(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """Numbers of the parameters that positions [first, end) of `spans` read."""
        owners, places = self.readers
        results: set[int] = set()
        for first, end in spans:
            results.update(owners[bisect_left(places, first) : bisect_left(places, end)])
        return sorted(results)

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Names of the parameters, without buffers."""
        return frozenset(s.name for s in self.step.inputs if s.kind == "parameter")

    def _find_parameters(self) -> tuple[Parameter, ...]:
        step, storages = self.step, self.storages
        results: dict[str, Parameter] = {}
        storage, _, place, ahead = storages.uses
        storage, place = storage[ahead], place[ahead]
        ends = np.searchsorted(storage, np.arange(len(storages) + 1))
        sizes = [t.value.numel() * t.value.element_size() for t in self.tensors]
        read_late = self._read_late()
        for index in np.flatnonzero(storages.input >= 0).tolist():
            spec = step.inputs[int(storages.input[index])]
            if spec.kind not in ("parameter", "buffer"):
                continue
            name = step.tied.get(spec.name, spec.name)
            known = results.get(name)
            positions = set(place[ends[index] : ends[index + 1]].tolist())
            positions |= set(known.positions if known else ())
            trainable = spec.kind == "parameter" and spec.name in step.trainable
            which = int(storages.tensor[index])
            shape = tuple(self.tensors[which].value.shape)
            late = bool(read_late[storages.row[index]]) or (known is not None and known.late)
            results[name] = Parameter(
                name, sizes[which], trainable, tuple(sorted(positions)), shape, late
            )
        return tuple(results.values())

    def _read_late(self) -> np.ndarray:
        """Row → whether the backward reads it, itself or through a cast that is repeated there."""
        lines, storages = self.lines, self.storages
        late = np.zeros(len(lines.of), dtype=bool)
        late[storages.row[storages.last_backward >= 0]] = True
        root, repeated = lines.roots()[0], self.node_released
        pairs = repeated[lines.reader]
        reader, source = lines.reader[pairs][::-1], root[lines.source[pairs]][::-1]
        for row, read in zip(reader.tolist(), source.tolist(), strict=True):
            if late[row]:
                late[read] = True
        return late

    @cached_property
    def crossing(self) -> Crossing:
        """Values that may cross a cut."""
        storages = self.storages
        storage, _, place, ahead = storages.uses
        storage, place = storage[ahead], place[ahead]
        last = np.full(len(storages), -1)
        np.maximum.at(last, storage, place)
        chosen = storages.owned & (last > storages.at) & ~self._of_parameters[storages.row]
        number = np.cumsum(chosen) - 1
        result = np.flatnonzero(chosen)
        uses = number[storage[chosen[storage]]], place[chosen[storage]]
        return Crossing(result, storages.at[result], last[result], uses)

    @cached_property
    def node_released(self) -> np.ndarray:
        """Calls of the forward that cast a parameter (`passes.parameters.recompute_casts` repeats
        them for the backward)."""
        cast = self.lines.by_row([n.target is _CAST for n in self.lines.nodes])
        return cast & self._of_parameters & self.node_forward

    @cached_property
    def node_held(self) -> np.ndarray:
        """Those of them that `passes.parameters.cast_parameters_once` may run once a step: casts of
        a parameter itself to 16 bits."""
        lines = self.lines
        own = np.zeros(len(lines.of), dtype=bool)
        own[lines.inputs] = [spec.kind == "parameter" for spec in self.step.inputs]
        direct = np.zeros(len(lines.of), dtype=bool)
        direct[lines.reader[own[lines.source]]] = True
        plain = [set(n.kwargs) == {"dtype"} and n.kwargs["dtype"] in _LOW for n in lines.nodes]
        return self.node_released & direct & lines.by_row(plain)

    @cached_property
    def node_added(self) -> np.ndarray:
        """Matmuls whose result is the gradient of a parameter: where gradients are accumulated,
        they write into the buckets themselves (`passes.gradients.accumulate_gradients`)."""
        result = np.zeros(len(self.lines.of), dtype=bool)
        result[self.storages.row[self.storages.gradient]] = True
        return result & self.lines.by_row([_is_result(n) for n in self.lines.nodes])

    @cached_property
    def held_casts(self) -> tuple[np.ndarray, ...]:
        """(storage of the cast, row of the parameter, position) of each."""
        lines, storages = self.lines, self.storages
        result = np.flatnonzero(self.node_held[storages.row])
        source = np.zeros(len(lines.of), dtype=np.int64)
        source[lines.reader] = lines.source  # a cast has one input
        return result, source[storages.row[result]], storages.at[result]

    @cached_property
    def node_views(self) -> np.ndarray:
        """Calls that are views of another call's result."""
        return self.lines.by_row([is_view(n) for n in self.lines.nodes])

    @cached_property
    def node_gathers(self) -> np.ndarray:
        """Calls that all-gather values of other devices."""
        return self.lines.by_row([KINDS.get(n.target) == "all-gather" for n in self.lines.nodes])

    @cached_property
    def _of_parameters(self) -> np.ndarray:
        """Rows that are a cast or copy of one parameter: each stage computes its own."""
        lines = self.lines
        given = np.zeros(len(lines.of), dtype=bool)
        given[lines.inputs] = [spec.kind == "batch" for spec in self.step.inputs]
        apart = lines.by_row([n.op == "placeholder" for n in lines.nodes]) & ~lines.reached(given)
        alone = np.bincount(lines.reader, minlength=len(lines.of)) == 1
        alone &= lines.by_row([n.op == "call_function" for n in lines.nodes])
        behind = np.arange(len(lines.of))
        single = alone[lines.reader]
        behind[lines.reader[single]] = lines.source[single]
        while (behind[behind] != behind).any():
            behind = behind[behind]
        return apart[behind]


def _lines(step: StepGraph) -> Lines:
    if step.repeats is not None:
        try:
            return unfolded(step)
        except NotRepeated:  # a rewrite of the full graph, which can be read
            pass
    return read_lines(step)


def _asked(node: fx.Node) -> Any:
    """What a node's cost depends on: its call, with sizes and dtypes instead of values, and how
    many nodes share the cast of its operand."""
    if node.op != "call_function" or is_view(node):
        return None
    order = {n: i for i, n in enumerate(node.all_input_nodes)}

    def key_of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            within = first_input(value) if value.target is torch.ops.aten.expand.default else value
            return order[value], *_sized(value), within.meta.get("dims")
        if isinstance(value, (list, tuple)):
            return tuple(key_of(v) for v in value)
        return str(value)

    given = (*node.args, *node.kwargs.values())
    return node.target, left_readers(node), tuple(key_of(v) for v in given), *_sized(node)


def _sized(node: fx.Node) -> tuple[Any, str]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return node.meta.get("dims"), " ".join(str(getattr(v, "dtype", "")) for v in values)
