"""The nodes of a joint graph as columns: read from the graph, or unfolded from one of few layers.

Of a deep model few layers are read (`ir.replication.repeat` proves that the others are copies of
them); rows and what they read then follow by arithmetic on arrays, in the order in which
`Pattern.graph` would create the nodes. So a profile of 126 layers costs little more than one of
four.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import getitem
from typing import cast

import numpy as np
from torch import fx

from graphaccel.capture.layers.replicate import layered
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.replication.repeat import Pattern
from graphaccel.ir.replication.unfold import Unfolded, node_names, unfolded_from
from graphaccel.planner.profile.cost import is_view


@dataclass(frozen=True, eq=False)
class Lines:
    """A row for each node, in the order of the graph (without its output).

    nodes: those that were read. of: row → the node that it is, or is a copy of. place: row →
    position in the forward graph. reader, source: pairs of rows, by reader and then in the order of
    its inputs, each input once. inputs, results: rows of the graph's placeholders and results.
    modules: position → module path, "" where there is none.
    """

    nodes: tuple[fx.Node, ...] = field(repr=False)
    of: np.ndarray
    place: np.ndarray
    reader: np.ndarray
    source: np.ndarray
    inputs: np.ndarray
    results: np.ndarray
    modules: tuple[str, ...] = field(repr=False)

    def by_row(self, values: list) -> np.ndarray:
        """Values of the nodes that were read, expanded to every row."""
        return np.array(values)[self.of]

    def reached(self, seed: np.ndarray) -> np.ndarray:
        """Rows that are in `seed`, or read one that is."""
        result = seed.tolist()
        for reader, source in zip(self.reader.tolist(), self.source.tolist(), strict=True):
            if result[source]:
                result[reader] = True
        return np.array(result, dtype=bool)

    def roots(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, item) whose memory each row views: itself unless it is a view. item: -1 for all of
        its tensors."""
        view = self.by_row([is_view(n) for n in self.nodes])
        item = self.by_row([_item(n) for n in self.nodes])
        first = np.arange(len(self.of))
        first[self.reader[::-1]] = self.source[::-1]  # of several, the first input stays
        root, part = np.arange(len(self.of)), np.full(len(self.of), -1)
        left = np.flatnonzero(view)
        while len(left):
            here = root[left]
            behind = first[here]
            picked = (item[here] >= 0) & ~view[behind]
            part[left[picked]] = item[here[picked]]
            root[left] = behind
            left = left[view[behind]]
        return root, part


def _item(node: fx.Node) -> int:
    return cast(int, node.args[1]) if node.target is getitem else -1


def read_lines(step: StepGraph) -> Lines:
    """The rows of a step's own graph."""
    position = {name: i for i, name in enumerate(node_names(step.forward.graph))}
    *nodes, output = step.graph.graph.nodes
    row = {node: i for i, node in enumerate(nodes)}
    place = np.array([_place(n, n.meta.get("origin", ""), position) for n in nodes])
    pairs = [(i, row[source]) for i, n in enumerate(nodes) for source in n.all_input_nodes]
    reader, source = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    modules = [""] * len(position)
    for node, at in zip(nodes, place.tolist(), strict=True):
        modules[at] = modules[at] or node.meta.get("module", "")
    return Lines(
        tuple(nodes),
        np.arange(len(nodes)),
        place,
        reader,
        source,
        np.array([i for i, n in enumerate(nodes) if n.op == "placeholder"], dtype=np.int64),
        np.array([row[n] for n in cast(tuple[fx.Node, ...], output.args[0])], dtype=np.int64),
        tuple(modules),
    )


def _place(node: fx.Node, origin: str, position: dict[str, int]) -> int:
    """The position of a node is that of its origin; without one the last or the first."""
    if origin in position:
        return position[origin]
    return len(position) - 1 if node.meta.get("phase") == "backward" else 0


def unfolded(step: StepGraph) -> Lines:
    """The rows of all layers, of a step whose `repeats` holds the graphs of few.

    Raises NotRepeated where these do not determine the rows of more layers.
    """
    few, known = step.repeats, unfolded_from(step.graph)
    assert few is not None
    if known is not None:
        return _Unfolding(step, known).lines()
    short, *longer = (
        layered(each.graph, each.inputs, each.outputs) for each in (few.short, *few.longer)
    )
    pattern = Pattern(few.runs, short, longer, named=False)
    return _Unfolding(step, Unfolded(pattern)).lines()


class _Unfolding:
    """The rows that a pattern represents. An item is a node or result of the short graph."""

    def __init__(self, step: StepGraph, rows: Unfolded) -> None:
        self.rows = rows
        self.position = {name: i for i, name in enumerate(node_names(step.forward.graph))}

    def lines(self) -> Lines:
        rows = self.rows
        call = rows.reader < rows.nodes
        place = self._places()
        given = np.array([n.op == "placeholder" for n in rows.read])
        return Lines(
            rows.read,
            rows.item[: rows.nodes],
            place,
            rows.reader[call],
            rows.source[call],
            np.flatnonzero(given[rows.item[: rows.nodes]]),
            rows.source[~call],
            self._modules(place),
        )

    def _places(self) -> np.ndarray:
        """Position of each row. It grows evenly from copy to copy if it does over three."""
        rows = self.rows
        result = np.empty(rows.nodes, dtype=np.int64)
        for i in range(len(rows.read)):
            count, start = int(rows.count[i]), int(rows.start[i])
            first, last = self._place(i, 1), self._place(i, count)
            steps = np.arange(count)
            if count == 1 or first == last:
                result[start : start + count] = first
                continue
            stride = self._place(i, 2) - first
            even = first + stride * steps
            if even[-1] != last:
                even = np.array([self._place(i, c + 1) for c in steps.tolist()])
            result[start : start + count] = even
        return result[(rows.start[rows.item] + rows.copy - 1)[: rows.nodes]]

    def _place(self, index: int, copy: int) -> int:
        name = self.rows.builders[index].names.get("origin")
        node = self.rows.read[index]
        origin = node.meta.get("origin", "") if name is None else name.at((), copy)
        return _place(node, origin, self.position)

    def _modules(self, place: np.ndarray) -> tuple[str, ...]:
        """The module of the first row at each position that has one."""
        known = self.rows.per_node([bool(n.meta.get("module")) for n in self.rows.read])
        rows = np.flatnonzero(known)
        positions, first = np.unique(place[rows], return_index=True)
        modules = [""] * len(self.position)
        for at, path in zip(positions.tolist(), self.rows.paths(rows[first]), strict=True):
            modules[at] = path
        return tuple(modules)
