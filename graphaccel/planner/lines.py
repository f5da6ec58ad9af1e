"""The nodes of a joint graph as columns: read from the graph, or unfolded from that of few layers.

Of a deep model few layers are read (`ir.repeat` proves that the others are copies of them); rows
and what they read then follow by arithmetic on arrays, in the order in which `Pattern.graph` would
have made the nodes. So a profile of 126 layers costs little more than one of four.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import getitem
from typing import Any, cast

import numpy as np
from torch import fx

from graphaccel.capture.replicate import layered
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.layers import Item, NotRepeated
from graphaccel.ir.repeat import Pattern
from graphaccel.planner.cost import is_view


@dataclass(frozen=True, eq=False)
class Lines:
    """A row for each node, in the order of the graph (its output left out).

    nodes: those that were read. of: row → the one of them it is, or is a copy of. place: row →
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

    def told(self, values: list) -> np.ndarray:
        """What is known of the nodes that were read, of each row."""
        return np.array(values)[self.of]

    def reached(self, seed: np.ndarray) -> np.ndarray:
        """Rows that are in `seed`, or read one that is."""
        found = seed.tolist()
        for reader, source in zip(self.reader.tolist(), self.source.tolist(), strict=True):
            if found[source]:
                found[reader] = True
        return np.array(found, dtype=bool)

    def roots(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, item) whose memory each row looks at: itself unless it is a view. item: -1 for all
        of its tensors."""
        view = self.told([is_view(n) for n in self.nodes])
        item = self.told([_item(n) for n in self.nodes])
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
    position = {node.name: i for i, node in enumerate(step.forward.graph.graph.nodes)}
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
    """A node lies where its origin does; without one at the end or the start."""
    if origin in position:
        return position[origin]
    return len(position) - 1 if node.meta.get("phase") == "backward" else 0


def unfolded(step: StepGraph) -> Lines:
    """The rows of all layers, of a step whose `repeats` holds the graphs of few.

    Raises NotRepeated where they do not tell those of more.
    """
    few = step.repeats
    assert few is not None
    short, *longer = (
        layered(each.graph, each.inputs, each.outputs) for each in (few.short, *few.longer)
    )
    return _Unfolding(step, Pattern(few.runs, short, longer)).lines()


class _Unfolding:
    """The rows that a pattern stands for. An item is a node or result of the short graph."""

    def __init__(self, step: StepGraph, pattern: Pattern) -> None:
        self.pattern = pattern
        self.position = {n.name: i for i, n in enumerate(step.forward.graph.graph.nodes)}
        self.more = [run.count - pattern.kept for run in pattern.runs]
        self.middle = np.array([item.middle for item in pattern.items])
        self.count = np.array([self.more[m] + 1 if m >= 0 else 1 for m in self.middle.tolist()])
        self.start = np.cumsum(self.count) - self.count  # of an item's copies, in `row`
        self.item, self.copy = self._order()
        self.row = np.empty(len(self.item), dtype=np.int64)
        self.row[self.start[self.item] + self.copy - 1] = np.arange(len(self.item))

    def lines(self) -> Lines:
        items = self.pattern.items
        nodes = tuple(item.node for item in items if item.node is not None)
        rows = int(self.count[: len(nodes)].sum())
        if (self.item[:rows] >= len(nodes)).any():
            raise NotRepeated("results stand between the nodes")
        reader, source = self._edges()
        if (source >= reader).any():
            raise NotRepeated("a layer reads what is made after it")
        call = reader < rows
        place = self._places(len(nodes))
        given = np.array([n.op == "placeholder" for n in nodes])
        return Lines(
            nodes,
            self.item[:rows],
            place,
            reader[call],
            source[call],
            np.flatnonzero(given[self.item[:rows]]),
            source[~call],
            self._modules(place),
        )

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """(item, copy) of each row: items of one layer stand together, layer by layer."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        items, down = self.pattern.items, self.pattern.descending
        where = [(item.middle, item.section) for item in items]
        for (run, _), group in groupby(range(len(where)), where.__getitem__):
            own = np.array(list(group))
            copies = np.arange(1, (self.more[run] + 1 if run >= 0 else 1) + 1)
            if run >= 0 and down[run].get(int(own[0]), False):
                copies = copies[::-1]
            found.append((np.tile(own, len(copies)), np.repeat(copies, len(own))))
        item, copy = (np.concatenate(column) for column in zip(*found, strict=True))
        return item, copy

    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """(reader, source) rows, by reader and in the order of its inputs."""
        told = [
            (i, slot, ref.item, max(ref.near, 0), ref.step, ref.last)
            for i, known in enumerate(self.pattern.learned)
            for slot, ref in enumerate(dict.fromkeys(known.refs))
        ]
        slots = np.array(told, dtype=np.int64).reshape(-1, 6)
        times = self.count[slots[:, 0]]
        reader, slot, target, near, step, last = np.repeat(slots, times, axis=0).T
        copy = np.arange(len(reader)) - np.repeat(np.cumsum(times) - times, times) + 1
        beside = (step != 0) & (copy + step >= 1) & (copy + step <= self.count[reader])
        same = (self.middle[target] == self.middle[reader]) & (self.middle[reader] >= 0)
        found = np.where(
            beside,
            self.start[near] + copy + step - 1,
            self.start[target]
            + np.where(same, copy - 1, np.where(last == 1, self.count[target] - 1, 0)),
        )
        rows, sources = self.row[self.start[reader] + copy - 1], self.row[found]
        order = np.lexsort((slot, rows))
        rows, sources = rows[order], sources[order]
        _, once = np.unique(rows * len(self.row) + sources, return_index=True)
        once = np.sort(once)  # two slots may hold the same node
        return rows[once], sources[once]

    def _places(self, nodes: int) -> np.ndarray:
        """Position of each row. It grows evenly from copy to copy where it does over three."""
        found = np.empty(int(self.count[:nodes].sum()), dtype=np.int64)
        for i, item in enumerate(self.pattern.items[:nodes]):
            count, start = int(self.count[i]), int(self.start[i])
            first, last = self._place(i, item, 1), self._place(i, item, count)
            steps = np.arange(count)
            if count == 1 or first == last:
                found[start : start + count] = first
                continue
            stride = self._place(i, item, 2) - first
            even = first + stride * steps
            if even[-1] != last:
                even = np.array([self._place(i, item, c + 1) for c in steps.tolist()])
            found[start : start + count] = even
        return found[(self.start[self.item] + self.copy - 1)[: len(found)]]

    def _place(self, index: int, item: Item, copy: int) -> int:
        name = self.pattern.learned[index].names.get("origin")
        assert item.node is not None
        origin = item.node.meta.get("origin", "") if name is None else name.at(self.more, copy)
        return _place(item.node, origin, self.position)

    def _modules(self, place: np.ndarray) -> tuple[str, ...]:
        """Of the first row at each position that has one."""
        known = [bool(i.node is not None and i.node.meta.get("module")) for i in self.pattern.items]
        rows = np.flatnonzero(np.array(known)[self.item[: len(place)]])
        positions, first = np.unique(place[rows], return_index=True)
        modules = [""] * len(self.position)
        for at, row in zip(positions.tolist(), rows[first].tolist(), strict=True):
            modules[at] = self._module(int(self.item[row]), int(self.copy[row]))
        return tuple(modules)

    def _module(self, index: int, copy: int) -> str:
        item, learned = self.pattern.items[index], self.pattern.learned[index]
        assert item.node is not None
        path: Any = learned.path.at(self.more, copy)
        if item.named and (tail := learned.names.get("tail")) is not None:
            path = f"{path}_{tail.number_at(self.more, copy)}"
        return item.node.meta["module"] if path == item.place else path
