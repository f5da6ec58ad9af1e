"""List the nodes of a graph of many identical layers without building the graph.

`Pattern` (`ir.replication.repeat`) knows how one layer follows from the one before. The number of
nodes of the graph of all layers, their names, what each reads, its inputs and results are then
array arithmetic, which costs next to nothing however many layers there are. The graph itself is
built lazily (`Unfolded.module`): a plan needs sizes, and only what runs needs nodes.
"""

from __future__ import annotations

from functools import cached_property
from typing import cast

import numpy as np
from torch import fx

from graphaccel.compat.torch.graphs import deferred_from, deferred_module
from graphaccel.ir.replication.layers import NUMBER, NotRepeated, split
from graphaccel.ir.replication.repeat import Pattern


class Unfolded:
    """The graph of as many layers as a pattern's runs have, as rows: one a node, in order, then one
    for each result.

    slots: (reader, source) rows of every argument that is a node, by reader and in order. reader,
    source: likewise, each source of a reader once.
    item, copy: row → its item of the pattern, and which copy of it, from 1. nodes: number of rows
    that are nodes (without the output). inputs, outputs: for each placeholder and result, its index
    in the short graph, and its name; input_copies, output_copies: which copy it is.

    Raises NotRepeated where there is no such graph. For a pattern without names there are no
    `names`, and no module.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.builders = pattern.builders()
        more = [run.count - pattern.kept for run in pattern.runs]
        middle = [item.middle for item in pattern.items]
        self.middle = np.array(middle)
        self.count = np.array([more[m] + 1 if m >= 0 else 1 for m in middle])
        self.start = np.cumsum(self.count) - self.count  # of an item's copies, in `row`
        self.item, self.copy = self._order()
        self.row = np.empty(len(self.item), dtype=np.int64)
        self.row[self.start[self.item] + self.copy - 1] = np.arange(len(self.item))
        self.read = tuple(item.node for item in pattern.items if item.node is not None)
        self.nodes = int(self.count[: len(self.read)].sum())
        if (self.item[: self.nodes] >= len(self.read)).any():
            raise NotRepeated("results stand between the nodes")
        self.slots = self._slots()
        self.reader, self.source = self._edges()
        if (self.source >= self.reader).any():
            raise NotRepeated("a layer reads what is made after it")
        if pattern.named and not self._distinct():
            raise NotRepeated("two nodes would have one name")
        self.inputs, self.input_copies = self._inputs()
        self.outputs, self.output_copies = self._outputs()

    # ---- rows

    @cached_property
    def names(self) -> list[str]:
        """The names of the nodes."""
        builders = zip(self.builders[: len(self.read)], self.count.tolist(), strict=False)
        flat = [name for builder, count in builders for name in builder.names_of_copies(count)]
        return [flat[i] for i in (self.start[self.item] + self.copy - 1)[: self.nodes].tolist()]

    def _distinct(self) -> bool:
        """Whether no two nodes have one name; computed from the numbers in names that have some."""
        bases: dict[str, int] = {}
        counted: list[tuple[int, int, int, int]] = []
        plain: list[str] = []
        for builder, count in zip(
            self.builders[: len(self.read)], self.count.tolist(), strict=False
        ):
            name = None if builder.item.named else builder.names["name"]
            if name is None or NUMBER.match(name.base):
                plain += builder.names_of_copies(count)
            else:
                base = bases.setdefault(name.base, len(bases))
                counted.append((base, name.number, name.step, count))
        for base, number in map(split, plain):
            if base in bases:
                counted.append((bases[base], number, 0, 1))
        of, first, step, times = np.array(counted, dtype=np.int64).reshape(-1, 4).T
        copy = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        numbers = np.repeat(first, times) + np.repeat(step, times) * copy
        pairs = np.repeat(of, times) * (1 << 32) + numbers
        return len(set(plain)) == len(plain) and len(np.unique(pairs)) == len(pairs)

    def path(self, row: int) -> str:
        """The path of a node's module or parameter, from its metadata; "" where it has none."""
        return self.paths(np.array([row]))[0]

    def paths(self, rows: np.ndarray) -> list[str]:
        """The paths of several nodes."""
        result = [""] * len(rows)
        items, copies = self.item[rows], self.copy[rows]
        order = np.argsort(items, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(items[order])) + 1):
            index = int(items[own[0]])
            if known := self.read[index].meta.get("module", ""):
                place = self.pattern.items[index].place
                paths = self.builders[index].full_paths(copies[own].tolist())
                for at, path in zip(own.tolist(), paths, strict=True):
                    result[at] = known if path == place else path
        return result

    def per_node(self, values: list) -> np.ndarray:
        """Values of the items that are nodes, repeated for each node."""
        return np.array(values)[self.item[: self.nodes]]

    @property
    def end(self) -> str:
        """The name of the output: the one a graph with these names would give it."""
        used = set(self.names)
        wanted = ("output", *(f"output_{n}" for n in range(1, len(used) + 2)))
        return next(name for name in wanted if name not in used)

    @cached_property
    def results(self) -> list[int]:
        """The row of each result, -1 where it is not a node."""
        rows = np.full(len(self.item) - self.nodes, -1)
        of = self.reader >= self.nodes
        rows[self.reader[of] - self.nodes] = self.source[of]
        return rows.tolist()

    @property
    def input_values(self) -> list[str]:
        """The name of each placeholder's value; "" where there is none."""
        pairs = zip(self.inputs, self.input_copies, strict=True)
        return [self._value(i, copy) for (i, _), copy in pairs]

    @property
    def output_values(self) -> list[str]:
        """The name of each result's value, likewise."""
        pairs, first = zip(self.outputs, self.output_copies, strict=True), len(self.read)
        return [self._value(first + i, copy) for (i, _), copy in pairs]

    def _value(self, item: int, copy: int) -> str:
        name = self.builders[item].names.get("value")
        return "" if name is None else name.at((), copy)

    # ---- the graph

    def module(self, root: fx.GraphModule) -> fx.GraphModule:
        """The graph, built on first use. root: the module with its constants."""
        return deferred_module(root, self._graph, self)

    def _graph(self) -> fx.Graph:
        return self.pattern.graph(self.builders)

    # ---- arithmetic

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """(item, copy) of each row: items of one layer are adjacent, layer by layer."""
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        for run, group in self.pattern.groups():
            own = np.array(group)
            copies = np.arange(1, int(self.count[own[0]]) + 1)
            if self.pattern.down(run, group[0]):
                copies = copies[::-1]
            rows.append((np.tile(own, len(copies)), np.repeat(copies, len(own))))
        item, copy = (np.concatenate(column) for column in zip(*rows, strict=True))
        return item, copy

    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        """(reader, source) rows of every argument that is a node, by reader and in order."""
        columns = [
            (i, slot, ref.item, max(ref.near, 0), ref.step, ref.last)
            for i, dependence in enumerate(self.pattern.dependences)
            for slot, ref in enumerate(dependence.refs)
        ]
        slots = np.array(columns, dtype=np.int64).reshape(-1, 6)
        times = self.count[slots[:, 0]]
        reader, slot, target, near, step, last = np.repeat(slots, times, axis=0).T
        copy = np.arange(len(reader)) - np.repeat(np.cumsum(times) - times, times) + 1
        beside = (step != 0) & (copy + step >= 1) & (copy + step <= self.count[reader])
        same = (self.middle[target] == self.middle[reader]) & (self.middle[reader] >= 0)
        match = np.where(
            beside,
            self.start[near] + copy + step - 1,
            self.start[target]
            + np.where(same, copy - 1, np.where(last == 1, self.count[target] - 1, 0)),
        )
        rows, sources = self.row[self.start[reader] + copy - 1], self.row[match]
        order = np.lexsort((slot, rows))
        return rows[order], sources[order]

    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """(reader, source) rows, by reader and in the order of its inputs, each input once."""
        rows, sources = self.slots
        _, once = np.unique(rows * len(self.row) + sources, return_index=True)
        once = np.sort(once)  # two slots may contain the same node
        return rows[once], sources[once]

    def _inputs(self) -> tuple[list[tuple[int, str]], list[int]]:
        is_input = np.array([node.op == "placeholder" for node in self.read])
        rows = np.flatnonzero(is_input[self.item[: self.nodes]])
        items, copies = self.item[rows].tolist(), self.copy[rows].tolist()
        pairs = zip(items, copies, strict=True)
        return [(i, self.builders[i].full_path(copy)) for i, copy in pairs], copies

    def _outputs(self) -> tuple[list[tuple[int, str]], list[int]]:
        first = len(self.read)
        items, copies = self.item[self.nodes :].tolist(), self.copy[self.nodes :].tolist()
        pairs = zip(items, copies, strict=True)
        return [(i - first, self.builders[i].path(copy)) for i, copy in pairs], copies


def unfolded_from(module: fx.GraphModule) -> Unfolded | None:
    """The rows of a graph that is not built yet; None if it is built."""
    return cast("Unfolded | None", deferred_from(module))


def distinct_nodes(module: fx.GraphModule) -> list[tuple[fx.Node, int]]:
    """The nodes of a graph, without its output, each with its number of copies: 1, except for those
    of few layers that represent all. Names and modules are then those of the few layers."""
    known = unfolded_from(module)
    if known is not None:
        return list(zip(known.read, known.count.tolist(), strict=False))
    return [(node, 1) for node in module.graph.nodes if node.op != "output"]


def input_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a graph, or those of few layers that represent them."""
    known = unfolded_from(module)
    if known is not None:
        return [known.read[i] for i, _ in known.inputs]
    return list(module.graph.find_nodes(op="placeholder"))


def node_names(module: fx.GraphModule) -> list[str]:
    """The names of the nodes of a graph, its output included."""
    known = unfolded_from(module)
    if known is not None:
        return [*known.names, known.end]
    return [node.name for node in module.graph.nodes]
