"""A graph as columns, for counting the bytes that live while it runs (`planner.memory.liveness`).

A row is a node, in order. For a graph of many layers that is not built yet
(`ir.replication.unfold`) the columns are unfolded from those of few layers: so counting 126 layers
costs little more than counting four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import fx

from graphaccel.ir.replication.unfold import Unfolded, unfolded_from
from graphaccel.ir.values import returned, shares, tensors_of
from graphaccel.kernels.host_copy import TO_HOST
from graphaccel.kernels.ops.expert_rows import EXCHANGE, ROWS
from graphaccel.kernels.register import fusion_of, is_backward
from graphaccel.planner.profile.compiled_traffic import compiled_traffic
from graphaccel.planner.profile.cost import is_view

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_SENDING = {  # their inputs are held until their result is waited for
    _GATHER,
    torch.ops._c10d_functional.all_gather_into_tensor_out.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    EXCHANGE,
}
_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
Share: TypeAlias = Callable[[str], float]
_OWN, _ITSELF = -2, -1  # a storage of its own, or that of another tensor of the same value


def even(_: str) -> float:
    """The share of rows if every expert is chosen equally often."""
    return 1.0


@dataclass(frozen=True, eq=False)
class Rows:
    """The tensors that a graph's calls return and read.

    nodes: those that were read. of: row → the node that it is, or is a copy of. reader, source:
    pairs of rows, by reader and then in the order of its inputs, each input once. results: row of
    each result, -1 for what is no node. module: row → its module path. chosen: module path → the
    rows that chose this rank's experts there (`sharding.apply.token_dispatch`), over an even share.
    exchanged: a reduce-scatter receives the parts of all ranks, and its wait sums them, and an
    all-gather copies its own part at once (`runtime.gloo`). kernels: calls that Inductor compiles
    into one kernel run at once, when the last of them does; what lives within it takes no memory.

    Tensors are numbered row by row.
    """

    nodes: tuple[fx.Node, ...] = field(repr=False)
    of: np.ndarray
    reader: np.ndarray
    source: np.ndarray
    results: np.ndarray
    module: Callable[[int], str] = field(repr=False)
    chosen: Share = even
    exchanged: bool = False
    kernels: bool = False

    def __len__(self) -> int:
        return len(self.of)

    @cached_property
    def inputs(self) -> np.ndarray:
        """Rows of the placeholders."""
        return np.flatnonzero(np.array([n.op == "placeholder" for n in self.nodes])[self.of])

    @cached_property
    def calls(self) -> np.ndarray:
        """Rows of the calls."""
        return np.flatnonzero(np.array([n.op == "call_function" for n in self.nodes])[self.of])

    @cached_property
    def many(self) -> np.ndarray:
        """Row → number of tensors that it returns."""
        return self._many[self.of]

    @cached_property
    def first(self) -> np.ndarray:
        """Row → its first tensor."""
        return np.cumsum(self.many) - self.many

    @cached_property
    def row_of(self) -> np.ndarray:
        """Tensor → its row."""
        return np.repeat(np.arange(len(self.of)), self.many)

    @cached_property
    def size(self) -> np.ndarray:
        """Tensor → bytes of its own storage."""
        size = self._storages_of_results[self._known, 0]
        if self.kernels:
            size = np.where(self._within[self.row_of], 0, size)
        if self.chosen is not even:
            came = np.array([bool(n.meta.get("chosen")) for n in self.nodes], dtype=bool)
            result = np.array([n.target is ROWS for n in self.nodes], dtype=bool)[
                self.of[self.row_of]
            ]
            rows = ~result | (
                np.arange(len(self.row_of)) == self.first[self.row_of]
            )  # its first alone
            for tensor in np.flatnonzero(came[self.of[self.row_of]] & rows & (size > 0)):
                share = self.chosen(self.module(int(self.row_of[tensor])))
                size[tensor] = round(share * int(size[tensor]))
        return size

    @cached_property
    def offloaded(self) -> np.ndarray:
        """Tensor → whether it is on the host."""
        sent = np.array([node.target is TO_HOST for node in self.nodes], dtype=bool)
        return sent[self.of[self.row_of]]

    @cached_property
    def root(self) -> np.ndarray:
        """Tensor → the tensor whose storage it shares."""
        _, where, which = self._storages_of_results[self._known].T
        begin = np.searchsorted(self.reader, np.arange(len(self.of)))
        beside = np.clip(begin[self.row_of] + where, 0, max(0, len(self.source) - 1))
        source = self.source[beside] if len(self.source) else self.row_of
        there = np.where(where == _ITSELF, self.row_of, source)
        root = np.arange(len(self.row_of))
        root = np.where(where == _OWN, root, self.first[there] + which)
        while (root[root] != root).any():
            root = root[root]
        return root

    @cached_property
    def scratch(self) -> np.ndarray:
        """Row → bytes that it takes at its peak besides its results."""
        return np.array([_scratch(n) for n in self.nodes], dtype=np.int64)[self.of]

    @cached_property
    def waited(self) -> np.ndarray:
        """Row → the last row at which its send buffer must be held; 0 where it sends nothing.
        Received parts are summed when the communication is done."""
        wait = np.array([n.target is _WAIT for n in self.nodes], dtype=bool)[self.of]
        held = _SENDING - {_GATHER} if self.exchanged else _SENDING
        sends = np.array([n.target in held for n in self.nodes], dtype=bool)[self.of]
        pairs = wait[self.reader] & sends[self.source]
        waited = np.zeros(len(self.of), dtype=np.int64)
        adds = np.array([self.exchanged and n.target is _SCATTER for n in self.nodes], dtype=int)
        source = self.source[pairs]
        np.maximum.at(waited, source, self.reader[pairs] - adds[self.of[source]])
        return waited

    @cached_property
    def last(self) -> np.ndarray:
        """Row → the row of its last use: itself if it has none, one past the end for a result."""
        last = np.arange(len(self.of))
        np.maximum.at(last, self.source, self.reader)
        np.maximum.at(last, self.source, self.waited[self.reader])
        if self.kernels:
            np.maximum.at(last, self.source, self._until[self.reader])
        last[self.results[self.results >= 0]] = len(self.of)
        return last

    @cached_property
    def _within(self) -> np.ndarray:
        """Row → whether its value lives within a kernel of Inductor's."""
        known = compiled_traffic(self.nodes)
        lines = {node: i for i, node in enumerate(self.nodes)}
        within = np.zeros(len(self.nodes), dtype=bool)
        for node, part in known.items():
            if node in lines:
                within[lines[node]] = not part.written
        return within[self.of]

    @cached_property
    def _until(self) -> np.ndarray:
        """Row → the row at which its kernel runs: its own, unless its value lives within it."""
        until = np.arange(len(self.of))
        within = self._within.copy()
        view = np.array([is_view(n) for n in self.nodes], dtype=bool)[self.of]
        for reader, source in zip(self.reader.tolist(), self.source.tolist(), strict=True):
            if view[reader] and within[source]:
                within[reader] = True
        pairs = zip(self.reader[::-1].tolist(), self.source[::-1].tolist(), strict=True)
        for reader, source in pairs:
            if within[source]:
                until[source] = max(until[source], until[reader])
        return until

    @cached_property
    def _many(self) -> np.ndarray:
        return np.array([len(tensors_of(n.meta.get("val"))) for n in self.nodes], dtype=np.int64)

    @cached_property
    def _storages_of_results(self) -> np.ndarray:
        """For each tensor of the nodes that were read: (bytes, where its storage is, which)."""
        rows: list[tuple[int, int, int]] = []
        for node in self.nodes:
            tensors = tensors_of(node.meta.get("val"))
            if node.op != "call_function":
                rows += [(0, _OWN, 0)] * len(tensors)
                continue
            if self.exchanged and node.target in (_SCATTER, _WAIT):
                source = node.all_input_nodes[0]
                if node.target is _SCATTER or source.target is _SCATTER:
                    built = source if node.target is _SCATTER else node
                    rows.append((built.meta["val"].untyped_storage().nbytes(), _OWN, 0))
                    continue
            for tensor, origin in zip(tensors, shares(node), strict=True):
                if origin is None:
                    rows.append((tensor.untyped_storage().nbytes(), _OWN, 0))
                else:
                    rows.append((0, *origin))
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    @cached_property
    def _known(self) -> np.ndarray:
        """Tensor → its line in `_storages_of_results`."""
        start = np.cumsum(self._many) - self._many
        place = np.arange(len(self.row_of)) - self.first[self.row_of]
        return start[self.of[self.row_of]] + place


def rows_of(
    graph: fx.GraphModule, chosen: Share = even, *, exchanged: bool = False, kernels: bool = False
) -> Rows:
    """The columns of a graph; a graph that is not built yet is not built for it. chosen, exchanged,
    kernels: see `Rows`."""
    known = unfolded_from(graph)
    result = _read(graph, chosen) if known is None else _unfolded(known, chosen)
    return replace(result, exchanged=exchanged, kernels=kernels)


def _read(graph: fx.GraphModule, chosen: Share) -> Rows:
    nodes = [n for n in graph.graph.nodes if n.op != "output"]
    row = {node: i for i, node in enumerate(nodes)}
    pairs = [(i, row[source]) for i, n in enumerate(nodes) for source in n.all_input_nodes]
    reader, source = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    results = [row[n] if isinstance(n, fx.Node) else -1 for n in returned(graph)]
    return Rows(
        tuple(nodes),
        np.arange(len(nodes)),
        reader,
        source,
        np.array(results, dtype=np.int64),
        lambda at: nodes[at].meta.get("module", ""),
        chosen,
    )


def _unfolded(known: Unfolded, chosen: Share) -> Rows:
    call = known.reader < known.nodes
    return Rows(
        known.read,
        known.item[: known.nodes],
        known.reader[call],
        known.source[call],
        np.array(known.results, dtype=np.int64),
        known.path,
        chosen,
    )


def _scratch(node: fx.Node) -> int:
    """Bytes that a call takes at its peak besides its results."""
    if node.op != "call_function":
        return 0
    fusion = fusion_of(node.target)
    if fusion is None or fusion.workspace is None or is_backward(node.target):
        return node.meta.get("scratch", 0)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    return int(fusion.workspace(**dict(zip(fusion.inputs, values, strict=True))))
