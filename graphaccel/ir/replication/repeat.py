"""Graphs of many identical layers, derived from graphs of few layers.

A run is a sequence of consecutive identical layers. Given a graph of the model with `KEPT` layers
of each run, and for each run a graph with one more, `Pattern` finds in the former the nodes of the
run's middle layer, and proves on the latter that one more layer is one more copy of them: same
calls on the same shapes, every argument either within the copy, or the same for all copies, or of
the copy before or after it. Numbers in names are checked to grow linearly. `ir.replication.unfold`
then lists the nodes of any number of layers, and `Pattern.graph` builds them.

before (KEPT = 3 layers)                       after (4 layers)
  %h: = layer(%x, %w0)      # layers.0           %h: = layer(%x, %w0)      # layers.0
  %h_1: = layer(%h, %w1)    # layers.1           %h_1: = layer(%h, %w1)    # layers.1
  %h_2: = layer(%h_1, %w2)  # layers.2           %h_2: = layer(%h_1, %w2)  # layers.2
                                                 %h_3: = layer(%h_2, %w3)  # layers.3
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy as duplicate
from itertools import groupby
from typing import Any

from torch import fx

from graphaccel.ir.replication.copies import CopyBuilder, Dependence, Ref
from graphaccel.ir.replication.layers import (
    KEPT,
    Item,
    Layered,
    NotRepeated,
    Run,
    among,
    items_of,
    split,
)
from graphaccel.ir.replication.numbered import LayerPath, NumberedName
from graphaccel.ir.replication.pairs import copy_of_node, numbered_name, numbered_names, paired

_ALWAYS_NAMED = ("origin", "tail")  # of these, those needed without names too


class Pattern:
    """The repeating structure of a graph.

    short: with `kept` layers of each run. longer: for each run, with one more of it. The second
    layer is copied. named: whether a graph is built from it, whose nodes have names; otherwise only
    rows are computed (`ir.replication.unfold`), for which module paths are enough.

    Raises NotRepeated where more layers are not more copies of it.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        short: Layered,
        longer: Sequence[Layered],
        kept: int = KEPT,
        *,
        named: bool = True,
    ) -> None:
        self.runs, self.kept, self.named = tuple(runs), kept, named
        self.few = among(self.runs, (kept,) * len(self.runs))
        self.items = items_of(short, self.few, (1,) * len(self.runs))
        self._output = short.graph.output_node().meta
        self._at = {item.node: i for i, item in enumerate(self.items) if item.node is not None}
        pairs = []
        for run, graph in enumerate(longer):
            copied = tuple(1 + (r == run) for r in range(len(self.runs)))
            counts = among(self.runs, [kept - 1 + n for n in copied])
            pairs.append(paired(self.runs, run, self.items, items_of(graph, counts, copied)))
        self.descending = [descending for _, descending in pairs]
        self._counterparts = [counterparts for counterparts, _ in pairs]
        self._inverses = [copy_of_node(counterparts) for counterparts in self._counterparts]
        self._paths: dict[Hashable, LayerPath] = {}
        self._counted: dict[Hashable, NumberedName] = {}
        self.dependences = [self._dependence(i) for i in range(len(self.items))]

    # ---- what repeats

    def _dependence(self, index: int) -> Dependence:
        item = self.items[index]
        counterparts = [own[index] for own in self._counterparts]
        names = {
            key: self._name(
                value,
                [
                    [numbered_name(counterpart, key) for counterpart in each]
                    for each in counterparts
                ],
            )
            for key, value in numbered_names(item)
            if self.named or key in _ALWAYS_NAMED
        }
        covers = item.node.meta.get("covers", ()) if self.named and item.node is not None else ()
        covered = tuple(
            self._name(name, [[t.node.meta["covers"][k] for t in each] for each in counterparts])
            for k, name in enumerate(covers)
        )
        refs = tuple(self._ref(index, slot) for slot in range(len(item.refs)))
        return Dependence(refs, names, self._path(index), covered)

    def _path(self, index: int) -> LayerPath:
        """The path of an item; computed once for all items with the same paths in all graphs."""
        places = [
            [counterpart.place for counterpart in counterparts[index]]
            for counterparts in self._counterparts
        ]
        own = self.items[index].place
        key = own, *map(tuple, places)
        if key not in self._paths:
            self._paths[key] = self._path_of(own, places)
        return self._paths[key]

    def _path_of(self, own: str, places: Sequence[Sequence[str]]) -> LayerPath:
        # The first run of the container is at the same entry whatever the number of layers.
        run = next((r for r in self.few if _inside(r, own)), None)
        for other in (place for each in places for place in each):
            same = own == other if run is None else run.entry(own, 0) == run.entry(other, 0)
            if not same or (run is not None and run.number(other) is None):
                raise NotRepeated(f"the module of {own} changes with one more layer")
        if run is None:
            return LayerPath(own)
        numbers = [[("", run.number(place) or 0) for place in each] for each in places]
        return LayerPath(own, run, self._number(("", run.number(own) or 0), numbers))

    def _name(self, value: str, theirs: Sequence[Sequence[str]]) -> NumberedName:
        """theirs: the names of its counterparts, by run. Many nodes have one origin."""
        key = value, *map(tuple, theirs)
        if key not in self._counted:
            own, zero = split(value), value.endswith("_0")
            numbers = [list(map(split, each)) for each in theirs]
            self._counted[key] = self._number(own, numbers, zero)
        return self._counted[key]

    def _number(
        self,
        own: tuple[str, int],
        theirs: Sequence[Sequence[tuple[str, int]]],
        zero: bool = False,
    ) -> NumberedName:
        base, number = own
        slopes, step = [], 0
        for run, numbers in zip(self.runs, theirs, strict=True):
            if any(other != base for other, _ in numbers):
                raise NotRepeated(f"{base} has another name with one more layer in {run}")
            slopes.append(numbers[0][1] - number)
            if len(numbers) > 1:
                step = numbers[1][1] - numbers[0][1]
        return NumberedName(base, number, tuple(slopes), step, zero)

    def _ref(self, index: int, slot: int) -> Ref:
        item = self.items[index]
        target = self._at[item.refs[slot]]
        near, step, last = -1, 0, False
        for run, counterparts in enumerate(self._counterparts):
            inverse = self._inverses[run]
            first, *second = counterparts[index]
            first_source = inverse.get(first.refs[slot])
            middle = self.items[target].middle == run
            if not second:  # item not of the run: its argument may be
                if (
                    first_source is None
                    or first_source[0] != target
                    or (not middle and first_source[1])
                ):
                    raise self._differs(item, run)
                if middle:
                    last = first_source[1] == 2
                continue
            second_source = inverse.get(second[0].refs[slot])
            if first_source is None or second_source is None:
                raise self._differs(item, run)
            if middle:
                if first_source != (target, 1) or second_source != (target, 2):
                    raise self._differs(item, run)
            elif first_source == second_source == (target, 0):
                continue
            elif first_source == (target, 0) and second_source[1] == 1:
                near, step = second_source[0], -1
            elif second_source == (target, 0) and first_source[1] == 2:
                near, step = first_source[0], 1
            else:
                raise self._differs(item, run)
        return Ref(target, near, step, last)

    def _differs(self, item: Item, run: int) -> NotRepeated:
        name = f"result {item.path}" if item.node is None else item.node.name
        return NotRepeated(f"{name} reads something else with one more layer in {self.runs[run]}")

    def copy_metadata(self, *keys: str) -> None:
        """Copy metadata of the short graph's nodes to their counterparts in the longer ones."""
        for counterparts in self._counterparts:
            for item, own in zip(self.items, counterparts, strict=True):
                meta = {} if item.node is None else item.node.meta
                for counterpart in own:
                    if counterpart.node is not None:
                        counterpart.node.meta |= {key: meta[key] for key in keys if key in meta}

    # ---- many layers

    def at(self, like: Layered) -> Pattern:
        """The pattern with calls and values of `like`: the short graph at other sizes."""
        other = duplicate(self)
        other.items = items_of(like, self.few, (1,) * len(self.runs))
        return other

    def builders(self) -> list[CopyBuilder]:
        """For each item, what builds its copies."""
        more = [run.count - self.kept for run in self.runs]
        pairs = zip(self.items, self.dependences, strict=True)
        fixed_by_id: dict[int, Any] = {}  # many items share a name or a path

        def fixed(expression: Any) -> Any:
            if id(expression) not in fixed_by_id:
                fixed_by_id[id(expression)] = expression.among(more)
            return fixed_by_id[id(expression)]

        return [CopyBuilder(item, dependence, fixed) for item, dependence in pairs]

    def graph(self, builders: Sequence[CopyBuilder]) -> fx.Graph:
        """The graph of as many layers as the runs have. Values (`meta["val"]`) are shared by all
        copies of a node. Every source precedes its readers, as `ir.replication.unfold` has
        checked."""
        graph = fx.Graph()
        new: list[list[Any]] = [[] for _ in self.items]  # by copy, from 0
        results: list[Any] = []
        stacks: dict[Any, dict[str, tuple]] = {}
        for run, indices in self.groups():
            last = self.runs[run].count - self.kept + 1 if run >= 0 else 1
            for index in indices:
                new[index] = [None] * last
            order = range(1, last + 1)
            for number in reversed(order) if self.down(run, indices[0]) else order:
                for index in indices:
                    refs = [
                        self._source(new, r, number, last, run)
                        for r in self.dependences[index].refs
                    ]
                    call = builders[index].fill(refs)
                    if self.items[index].node is None:
                        results.append(call[0][0])
                    else:
                        new[index][number - 1] = builders[index].node(graph, number, call, stacks)
        graph.output(results).meta = dict(self._output)
        return graph

    def down(self, run: int, index: int) -> bool:
        """Whether the copies of an item of a run are in descending order."""
        return run >= 0 and self.descending[run].get(index, False)

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """Items in order: (run, the items that are copied together)."""
        where = [(item.middle, item.section) for item in self.items]
        for (run, _), indices in groupby(range(len(where)), where.__getitem__):
            yield run, list(indices)

    def _source(self, new: list, ref: Ref, copy: int, last: int, run: int) -> fx.Node:
        if ref.step and 1 <= copy + ref.step <= last:
            return new[ref.near][copy + ref.step - 1]
        if self.items[ref.item].middle == run >= 0:
            return new[ref.item][copy - 1]
        return new[ref.item][-1 if ref.last else 0]


def _inside(run: Run, path: str) -> bool:
    """Whether a path is in an entry of the run's container, the run's first or a later one."""
    number = run.number(path)
    return number is not None and number >= 0
