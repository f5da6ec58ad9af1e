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

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy as duplicate
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import fx

from graphaccel.ir.nodes import new_node
from graphaccel.ir.replication.layers import (
    KEPT,
    NUMBER,
    Item,
    Layered,
    NotRepeated,
    Run,
    among,
    filler,
    head,
    items_of,
    split,
)

_SAME = ("phase", "made_by", "bind")
_NAMES = ("origin", "stands_for")
_TOLD = ("origin", "tail")  # of these, those needed without names too
_WORD = re.compile("(?<=[a-z])([A-Z])")  # torch.fx inserts "_" before these in generated names
_DROPPED = ("custom", "from_node", "seq_nr")  # metadata of the trace that no copy needs


@dataclass(frozen=True)
class Ref:
    """The source of an argument: `item` of the pattern; in a copied item, `near` of the copy `step`
    away instead, where that copy exists. last: the last copy of an item outside of this one's
    run."""

    item: int
    near: int = -1
    step: int = 0
    last: bool = False


@dataclass(frozen=True)
class _Name:
    """`base_number`; the number grows by `slopes` per layer of each run and by `step` per copy.
    zero: the number 0 is written; otherwise it is left out."""

    base: str
    number: int
    slopes: tuple[int, ...] = ()
    step: int = 0
    zero: bool = False

    def number_at(self, more: Sequence[int], copy: int) -> int:
        number = self.number + sum(s * m for s, m in zip(self.slopes, more, strict=True))
        return number + self.step * (copy - 1)

    def at(self, more: Sequence[int], copy: int) -> str:
        number = self.number_at(more, copy)
        return f"{self.base}_{number}" if number or self.zero else self.base

    def among(self, more: Sequence[int]) -> _Name:
        """The name once `more` layers are fixed: `at((), copy)` then gives it."""
        return _Name(self.base, self.number_at(more, 1), (), self.step, self.zero)


@dataclass(frozen=True)
class _Path:
    """A module path or parameter name: entry `entry.number_at` of the container of `run`, whose
    entries are named by number; without a run `plain` is the name."""

    plain: str
    run: Run | None = None
    entry: _Name = _Name("", 0)

    def at(self, more: Sequence[int], copy: int) -> str:
        """The name among all layers."""
        if self.run is None:
            return self.plain
        return self.run.entry(self.plain, self.entry.number_at(more, copy))

    def all_at(self, copies: Sequence[int]) -> list[str]:
        """The names of copies, once the number of layers is fixed."""
        if self.run is None:
            return [self.plain] * len(copies)
        before, after = self.run.around(self.plain)
        first = self.run.first + self.entry.number - self.entry.step
        return [f"{before}{first + self.entry.step * copy}{after}" for copy in copies]

    def among(self, more: Sequence[int]) -> _Path:
        """The path once `more` layers are fixed."""
        return self if self.run is None else replace(self, entry=self.entry.among(more))


@dataclass(frozen=True)
class _Learned:
    """How one item depends on the number of layers."""

    refs: tuple[Ref, ...]
    names: Mapping[str, _Name]
    path: _Path
    covers: tuple[_Name, ...] = ()


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
            lying = among(self.runs, [kept - 1 + n for n in copied])
            pairs.append(_paired(self.runs, run, self.items, items_of(graph, lying, copied)))
        self.descending = [descending for _, descending in pairs]
        self._twins = [twins for twins, _ in pairs]
        self._inverses = [_inverse(twins) for twins in self._twins]
        self._paths: dict[Hashable, _Path] = {}
        self._counted: dict[Hashable, _Name] = {}
        self.learned = [self._learn(i) for i in range(len(self.items))]

    # ---- what repeats

    def _learn(self, index: int) -> _Learned:
        item = self.items[index]
        twins = [own[index] for own in self._twins]
        names = {
            key: self._name(value, [[_called(twin, key) for twin in each] for each in twins])
            for key, value in _names(item)
            if self.named or key in _TOLD
        }
        covers = item.node.meta.get("covers", ()) if self.named and item.node is not None else ()
        covered = tuple(
            self._name(name, [[t.node.meta["covers"][k] for t in each] for each in twins])
            for k, name in enumerate(covers)
        )
        refs = tuple(self._ref(index, slot) for slot in range(len(item.refs)))
        return _Learned(refs, names, self._path(index), covered)

    def _path(self, index: int) -> _Path:
        """The path of an item; computed once for all items with the same paths in all graphs."""
        places = [[twin.place for twin in twins[index]] for twins in self._twins]
        own = self.items[index].place
        key = own, *map(tuple, places)
        if key not in self._paths:
            self._paths[key] = self._path_of(own, places)
        return self._paths[key]

    def _path_of(self, own: str, places: Sequence[Sequence[str]]) -> _Path:
        # The first run of the container is at the same entry whatever the number of layers.
        run = next((r for r in self.few if _inside(r, own)), None)
        for other in (place for each in places for place in each):
            alike = own == other if run is None else run.entry(own, 0) == run.entry(other, 0)
            if not alike or (run is not None and run.number(other) is None):
                raise NotRepeated(f"the module of {own} changes with one more layer")
        if run is None:
            return _Path(own)
        numbers = [[("", run.number(place) or 0) for place in each] for each in places]
        return _Path(own, run, self._number(("", run.number(own) or 0), numbers))

    def _name(self, value: str, theirs: Sequence[Sequence[str]]) -> _Name:
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
    ) -> _Name:
        base, number = own
        slopes, step = [], 0
        for run, found in zip(self.runs, theirs, strict=True):
            if any(other != base for other, _ in found):
                raise NotRepeated(f"{base} has another name with one more layer in {run}")
            slopes.append(found[0][1] - number)
            if len(found) > 1:
                step = found[1][1] - found[0][1]
        return _Name(base, number, tuple(slopes), step, zero)

    def _ref(self, index: int, slot: int) -> Ref:
        item = self.items[index]
        target = self._at[item.refs[slot]]
        near, step, last = -1, 0, False
        for run, twins in enumerate(self._twins):
            inverse = self._inverses[run]
            first, *second = twins[index]
            given = inverse.get(first.refs[slot])
            middle = self.items[target].middle == run
            if not second:  # item not of the run: its argument may be
                if given is None or given[0] != target or (not middle and given[1]):
                    raise self._unlike(item, run)
                if middle:
                    last = given[1] == 2
                continue
            after = inverse.get(second[0].refs[slot])
            if given is None or after is None:
                raise self._unlike(item, run)
            if middle:
                if given != (target, 1) or after != (target, 2):
                    raise self._unlike(item, run)
            elif given == after == (target, 0):
                continue
            elif given == (target, 0) and after[1] == 1:
                near, step = after[0], -1
            elif after == (target, 0) and given[1] == 2:
                near, step = given[0], 1
            else:
                raise self._unlike(item, run)
        return Ref(target, near, step, last)

    def _unlike(self, item: Item, run: int) -> NotRepeated:
        name = f"result {item.path}" if item.node is None else item.node.name
        return NotRepeated(f"{name} reads something else with one more layer in {self.runs[run]}")

    def tell(self, *keys: str) -> None:
        """Copy metadata of the short graph's nodes to their counterparts in the longer ones."""
        for twins in self._twins:
            for item, own in zip(self.items, twins, strict=True):
                known = {} if item.node is None else item.node.meta
                for twin in own:
                    if twin.node is not None:
                        twin.node.meta |= {key: known[key] for key in keys if key in known}

    # ---- many layers

    def at(self, like: Layered) -> Pattern:
        """The pattern with calls and values of `like`: the short graph at other sizes."""
        twin = duplicate(self)
        twin.items = items_of(like, self.few, (1,) * len(self.runs))
        return twin

    def makers(self) -> list[Maker]:
        """The makers of all items, which build their copies."""
        more = [run.count - self.kept for run in self.runs]
        pairs = zip(self.items, self.learned, strict=True)
        known: dict[int, Any] = {}  # many items share a name or a path

        def lying(found: Any) -> Any:
            if id(found) not in known:
                known[id(found)] = found.among(more)
            return known[id(found)]

        return [Maker(item, learned, lying) for item, learned in pairs]

    def graph(self, makers: Sequence[Maker]) -> fx.Graph:
        """The graph of as many layers as the runs have. Values (`meta["val"]`) are shared by all
        copies of a node. Every source precedes its readers, as `ir.replication.unfold` has
        checked."""
        made = fx.Graph()
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
                        self._found(new, r, number, last, run) for r in self.learned[index].refs
                    ]
                    call = makers[index].fill(refs)
                    if self.items[index].node is None:
                        results.append(call[0][0])
                    else:
                        new[index][number - 1] = makers[index].node(made, number, call, stacks)
        made.output(results).meta = dict(self._output)
        return made

    def down(self, run: int, index: int) -> bool:
        """Whether the copies of an item of a run are in descending order."""
        return run >= 0 and self.descending[run].get(index, False)

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """Items in order: (run, the items that are copied together)."""
        where = [(item.middle, item.section) for item in self.items]
        for (run, _), indices in groupby(range(len(where)), where.__getitem__):
            yield run, list(indices)

    def _found(self, new: list, ref: Ref, copy: int, last: int, run: int) -> fx.Node:
        if ref.step and 1 <= copy + ref.step <= last:
            return new[ref.near][copy + ref.step - 1]
        if self.items[ref.item].middle == run >= 0:
            return new[ref.item][copy - 1]
        return new[ref.item][-1 if ref.last else 0]


class Maker:
    """Builds the copies of one item. lying: fixes the number of layers in a name or path."""

    def __init__(self, item: Item, learned: _Learned, lying: Callable[[Any], Any]) -> None:
        self.item = item
        self.names = {name: lying(found) for name, found in learned.names.items()}
        self.covers = [lying(found) for found in learned.covers]
        self.place = lying(learned.path)
        known = {} if item.node is None else item.node.meta
        self.meta = {k: v for k, v in known.items() if k not in _DROPPED}

    @cached_property
    def stack(self) -> tuple[tuple[str, tuple], ...]:
        """The module stack of the item."""
        return tuple(self.meta.get("nn_module_stack", {}).items())

    def path(self, copy: int) -> str:
        """The module or parameter of a copy; without the number at the end, if it is numbered."""
        return self.place.at((), copy)

    def whole(self, copy: int) -> str:
        """The path of a copy of a node, with the number at the end."""
        return self.path(copy) + self._end(copy)

    def all_whole(self, copies: Sequence[int]) -> list[str]:
        """`whole` of several copies."""
        paths = self.place.all_at(copies)
        if self.names.get("tail") is None or not self.item.named:
            return paths
        return [path + self._end(copy) for path, copy in zip(paths, copies, strict=True)]

    def named(self, copy: int) -> str:
        """The name of a copy of a node."""
        item = self.item
        assert item.node is not None
        if not item.named:
            return self.names["name"].at((), copy)
        path = self.path(copy)
        return _mangled(head(item.node.name, item.path), item.place, path) + self._end(copy)

    def all_named(self, count: int) -> list[str]:
        """The names of its copies."""
        name = None if self.item.named else self.names["name"]
        if name is None or not name.step:
            return [self.named(copy) for copy in range(1, count + 1)]
        numbers = range(name.number, name.number + name.step * count, name.step)
        base, bare = name.base, not name.zero
        return [base if bare and n == 0 else f"{base}_{n}" for n in numbers]

    def _end(self, copy: int) -> str:
        tail = self.names.get("tail") if self.item.named else None
        return "" if tail is None else f"_{tail.number_at((), copy)}"

    @cached_property
    def fill(self) -> Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
        """The sources of a copy → its arguments."""
        return filler(self.item.call)

    def node(
        self, graph: fx.Graph, copy: int, call: tuple[tuple, dict], stacks: dict[Any, Any]
    ) -> fx.Node:
        """Append one copy to the graph. stacks: module stacks, shared by the nodes that have the
        same."""
        old = self.item.node
        assert old is not None
        name, path = self.named(copy), self.whole(copy)
        target = name if old.op == "placeholder" else old.target
        node = new_node(graph, old.op, target, *call, name, self.meta)
        meta = node.meta
        for key in _NAMES:
            if key in self.names:
                meta[key] = self.names[key].at((), copy)
        if self.covers:
            meta["covers"] = tuple(n.at((), copy) for n in self.covers)
        if path != self.item.place:
            if "module" in meta:
                meta["module"] = path
            if self.stack:
                meta["nn_module_stack"] = self._stack(stacks, path)
        return node

    def _stack(self, stacks: dict[Any, Any], path: str) -> dict[str, tuple]:
        """The module stack of a copy: one for all nodes of its module."""
        key = (self.stack, path)
        if key not in stacks:
            own = self.place.run
            assert own is not None
            number, new = own.number(self.item.place), own.number(path) or 0
            stacks[key] = _stack(dict(self.stack), own, number, new)
        return stacks[key]


def _stack(stack: Mapping[str, tuple], run: Run, number: int | None, new: int) -> dict[str, tuple]:
    """The module stack of a node, with entry `new` of the run's container instead of `number`."""

    def path(text: str) -> str:
        inner = text.removeprefix("model.")
        if run.number(inner) != number:
            return text
        return text[: len(text) - len(inner)] + run.entry(inner, new)

    return {
        f"L__self__{path(entry[0])}" if path(entry[0]) != entry[0] else key: (
            path(entry[0]),
            *entry[1:],
        )
        for key, entry in stack.items()
    }


def _inside(run: Run, path: str) -> bool:
    """Whether a path is in an entry of the run's container, the run's first or a later one."""
    number = run.number(path)
    return number is not None and number >= 0


def _inverse(twins: Sequence[Sequence[Item]]) -> dict[fx.Node, tuple[int, int]]:
    """Node of the longer graph → (item, copy), copy 0 for items that are not copied."""
    return {
        twin.node: (i, copy if len(own) > 1 else 0)
        for i, own in enumerate(twins)
        for copy, twin in enumerate(own, 1)
        if twin.node is not None
    }


def _paired(
    runs: Sequence[Run], run: int, items: Sequence[Item], longer: Sequence[Item]
) -> tuple[list[list[Item]], dict[int, bool]]:
    """For each item its counterpart in the graph of one more layer of `run`, or its two
    counterparts; and for the items of the middle layer whether the copies are in descending
    order."""
    twins: list[list[Item]] = [[] for _ in items]
    descending: dict[int, bool] = {}
    at = start = 0
    while start < len(items):
        end = start
        if items[start].middle != run:
            twins[start] = [_next(longer, at)]
            at, end = at + 1, start + 1
        else:
            while end < len(items) and (items[end].middle, items[end].section) == (
                run,
                items[start].section,
            ):
                end += 1
            size = end - start
            halves = [longer[at : at + size], longer[at + size : at + 2 * size]]
            if len(halves[1]) != size or sorted(h[0].copy for h in halves) != [1, 2]:
                raise NotRepeated(f"another number of nodes with one more layer in {runs[run]}")
            down = halves[0][0].copy == 2
            for offset in range(size):
                own = [half[offset] for half in halves]
                twins[start + offset] = own[::-1] if down else own
                descending[start + offset] = down
            at += 2 * size
        start = end
    if at != len(longer):
        raise NotRepeated(f"another number of nodes with one more layer in {runs[run]}")
    for item, own in zip(items, twins, strict=True):
        for copy, twin in enumerate(own, 1):
            _check(runs, run, item, twin, copy if len(own) > 1 else 0)
    return twins, descending


def _next(items: Sequence[Item], at: int) -> Item:
    if at >= len(items):
        raise NotRepeated("fewer nodes with one more layer")
    return items[at]


def _check(runs: Sequence[Run], run: int, item: Item, twin: Item, copy: int) -> None:
    """Raises NotRepeated unless `twin` is `item` except for its sources and names."""

    def unlike(what: str) -> NotRepeated:
        name = item.path if item.node is None else f"{item.node.name} ({item.path})"
        return NotRepeated(f"{what} of {name} changes with one more layer in {runs[run]}")

    if (twin.middle == run) != bool(copy) or (not copy and twin.middle != item.middle):
        raise unlike("the layer")
    if item.written != repr(twin.call) or (item.node is None) != (twin.node is None):
        raise unlike("the call")
    if item.kind != twin.kind:
        raise unlike("the kind")
    a, b = item.node, twin.node
    if a is None or b is None:
        return
    if (a.op, "" if a.op == "placeholder" else a.target) != (
        b.op,
        "" if b.op == "placeholder" else b.target,
    ):
        raise unlike("the op")
    one, other = a.meta.get("val"), b.meta.get("val")
    if one is not other and _types(one) != _types(other):
        raise unlike("the shape")
    for key in _SAME:
        if a.meta.get(key) != b.meta.get(key):
            raise unlike("what is known")
    if item.named:
        named = _mangled(head(a.name, item.path), item.place, twin.place)
        if named != head(b.name, twin.path):
            raise unlike("the name")


def _types(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), value.device)
    if isinstance(value, (tuple, list)):
        return [_types(v) for v in value]
    return value


def _names(item: Item) -> list[tuple[str, str]]:
    """Names that depend on the number of layers: the node's own, those of nodes in its metadata,
    and that of its value."""
    value = [("value", item.value)] if item.value else []
    if item.node is None:
        return value
    if item.named:
        tail = NUMBER.match(item.path)
        return [("tail", f"tail_{tail[2]}")] if tail else []
    named = [(k, item.node.meta[k]) for k in _NAMES if item.node.meta.get(k)]
    return [("name", item.node.name), *named, *value]


def _called(item: Item, key: str) -> str:
    """One of these names; "" where there is none."""
    if key == "value" or item.node is None or item.named:
        return dict(_names(item)).get(key, "")
    return item.node.name if key == "name" else item.node.meta.get(key) or ""


def _mangled(name: str, old: str, new: str) -> str:
    """The name of a placeholder, with the parameter name in it replaced by another one."""
    if old == new:
        return name
    plain = [re.sub(r"[^0-9A-Za-z]+", "_", path) for path in (old, new)]
    snake = [_WORD.sub(r"_\1", path).lower() for path in plain]
    for before, after in (plain, [path.lower() for path in plain], snake):
        if before in name:
            return name.replace(before, after)
    raise NotRepeated(f"{name} is not called after {old}")
