"""Assign each node of a graph to one of the model's identical layers.

A run is a sequence of consecutive identical layers. `items_of` splits a graph for
`ir.replication.repeat`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any, TypeAlias

from torch import fx

from graphaccel.ir.values import module_path

KEPT = 3
"""Layers of a run in the graph that is repeated: the first, the copied one, the last."""

NUMBER = re.compile(r"^(.*)_(\d+)$", re.DOTALL)


_CONTAINERS = (tuple, list, dict, slice)

_Layer: TypeAlias = tuple[str, int]  # path of the container, entry


class NotRepeated(Exception):
    """The layers do not repeat: the reason is logged, and the full model is captured."""


@dataclass(frozen=True)
class Run:
    """Identical layers: entries `first` to `first + count - 1` of the container at `path`."""

    path: str
    first: int
    count: int

    def number(self, name: str) -> int | None:
        """The entry of the container that a module path or parameter name is in, relative to the
        run's first; None outside of the container."""
        prefix = f"{self.path}." if self.path else ""
        if not name.startswith(prefix):
            return None
        head = name[len(prefix) :].partition(".")[0]
        return int(head) - self.first if head.isdigit() else None

    def layer(self, number: int) -> str:
        """The path of one of its layers."""
        return f"{self.path}.{number + self.first}" if self.path else str(number + self.first)

    def entry(self, name: str, number: int) -> str:
        """A name in the container, moved to another entry."""
        before, after = self.around(name)
        return f"{before}{number + self.first}{after}"

    def around(self, name: str) -> tuple[str, str]:
        """The parts of a name in the container before and after the entry's number."""
        before = f"{self.path}." if self.path else ""
        return before, "".join(name[len(before) :].partition(".")[1:])


def among(runs: Sequence[Run], counts: Sequence[int]) -> tuple[Run, ...]:
    """The runs in a model where each has as many layers as `counts` says: entries after a run in
    its container are renumbered."""
    removed = [run.count - count for run, count in zip(runs, counts, strict=True)]
    return tuple(
        Run(
            run.path,
            run.first
            - sum(
                less
                for other, less in zip(runs, removed, strict=True)
                if other.path == run.path and other.first < run.first
            ),
            count,
        )
        for run, count in zip(runs, counts, strict=True)
    )


def copies(runs: Sequence[Run], name: str, kept: int | Sequence[int] = KEPT) -> list[str]:
    """The names, among all layers, of a module path or parameter. kept: layers of each run in the
    model that calls it `name`; a name in a run's second layer stands for all its copies."""
    counts = (kept,) * len(runs) if isinstance(kept, int) else tuple(kept)
    name_of_all = name
    for run, few in zip(runs, among(runs, counts), strict=True):
        number, more = few.number(name), run.count - few.count
        if number == 1:
            return [run.entry(name, copy) for copy in range(1, more + 2)]
        if number is not None and number >= 0:  # the last such run is the innermost
            name_of_all = run.entry(name, number + (more if number else 0))
    return [name_of_all]


@dataclass(frozen=True)
class Layered:
    """A graph, with the names of its first placeholders and of its results ("" for those in no
    layer), and their kinds, which are the same for all layers. numbered: placeholders that are not
    named after those names; none if empty. following: kinds of placeholders and results that belong
    to the layer that reads or computes them, whatever their names are. input_values, output_values:
    names of values passed between graphs, numbered as nodes are; none if empty, "" for those
    without a name."""

    graph: fx.Graph
    inputs: Sequence[str]
    outputs: Sequence[str]
    input_kinds: Sequence[object]
    output_kinds: Sequence[object]
    numbered: Sequence[bool] = ()
    following: frozenset[object] = frozenset()
    input_values: Sequence[str] = ()
    output_values: Sequence[str] = ()


@dataclass(eq=False)
class Item:
    """A node, or one of the graph's results (node None). path: of its module or parameter. middle,
    copy: the run whose middle layer contains it, -1 for none, and which copy. named: whether it is
    a placeholder named after its path. value: the name of a value passed between graphs."""

    node: fx.Node | None
    path: str
    section: str
    call: Any
    refs: list[fx.Node]
    kind: object = None
    middle: int = -1
    copy: int = 0
    named: bool = False
    value: str = ""

    @cached_property
    def written(self) -> str:
        """The call as text: 1, 1.0 and True differ."""
        return repr(self.call)

    @property
    def place(self) -> str:
        """The path, without the number at the end of numbered names."""
        return head(self.path) if self.named else self.path


def items_of(layered: Layered, runs: Sequence[Run], copied: Sequence[int]) -> list[Item]:
    """Nodes and results in order, each with its middle layer and copy. runs: as numbered in this
    graph. copied: number of middle layers of each.

    Nodes between two nodes of a layer belong to it, and so do those that follow up to the next
    layer.
    """
    items: list[Item] = []
    numbered = layered.numbered or (False,) * len(layered.inputs)
    inputs = iter(zip(layered.inputs, layered.input_kinds, numbered, strict=True))
    for node in layered.graph.nodes:
        if node.op == "placeholder":
            name, kind, number = next(inputs, ("", None, False))
            items.append(Item(node, name, "input", ((), {}), [], kind, named=not number))
        elif node.op != "output":
            call, refs = with_places((node.args, node.kwargs))
            section = node.meta.get("phase", "forward")
            items.append(
                Item(node, node.meta.get("module") or module_path(node), section, call, refs)
            )
    results: Any = layered.graph.output_node().args[0]
    specs = list(zip(layered.outputs, layered.output_kinds, strict=True))
    for value, (name, kind) in zip(results, specs, strict=True):
        call, refs = with_places(((value,), {}))
        items.append(Item(None, name, "result", call, refs, kind))
    for _, row in groupby(items, lambda item: item.section):
        for item, layer in _layers(list(row), runs):
            for number, run in enumerate(runs):
                if layer is not None and run.path == layer[0]:
                    copy = layer[1] - run.first
                    if 1 <= copy <= copied[number]:
                        item.middle, item.copy = number, copy
    _follow(items, layered.following)
    input_items = [item for item in items if item.section == "input"]
    for own, names in (
        (input_items, layered.input_values),
        (items[-len(specs) :], layered.output_values),
    ):
        for item, name in zip(own, names, strict=False):
            item.value = name
    return items


def _follow(items: Sequence[Item], kinds: frozenset[object]) -> None:
    """Assign placeholders and results of these kinds to the layer that reads or computes them."""
    at = {item.node: item for item in items if item.node is not None}
    order = {node: i for i, node in enumerate(at)}
    for item in items:
        if item.kind not in kinds or item.section not in ("input", "result"):
            continue
        beside = [item.refs[0]] if item.node is None else list(item.node.users)
        known = [node for node in beside if node in at]
        if known:
            other = at[min(known, key=order.__getitem__)]
            item.middle, item.copy = other.middle, other.copy


def _neighbours(layer: _Layer | None) -> tuple[_Layer, ...]:
    return () if layer is None else ((layer[0], layer[1] - 1), (layer[0], layer[1] + 1))


def _layers(items: Sequence[Item], runs: Sequence[Run]) -> Iterator[tuple[Item, _Layer | None]]:
    """The items of a section, each with the layer it belongs to, None before the first.

    Calls of an earlier layer in the middle of its neighbour belong to the neighbour: a pass moved
    them.
    """
    own: list[_Layer | None] = []
    known: dict[str, _Layer | None] = {}
    for item in items:
        if item.path not in known:
            known[item.path] = _layer(item.path, runs)
        own.append(known[item.path] or (own[-1] if own else None))
    rows = [(layer, len(list(row))) for layer, row in groupby(own)]
    at, seen, before = 0, set(), None
    calls = bool(items) and items[0].section not in ("input", "result")
    for (layer, size), (after, _) in zip_longest(rows, rows[1:], fillvalue=(None, 0)):
        if calls and layer in seen and before == after and before in _neighbours(layer):
            layer = before
        seen.add(layer)
        before = layer
        for item in items[at : at + size]:
            yield item, layer
        at += size


def _layer(path: str, runs: Sequence[Run]) -> _Layer | None:
    """The layer that contains a path."""
    numbers = [(run, run.number(path)) for run in runs]
    layers = [(run.path, run.first + number) for run, number in numbers if number is not None]
    return layers[-1] if layers else None


def with_places(value: Any) -> tuple[Any, list[fx.Node]]:
    """A call's arguments with nodes replaced by `Place`, and the nodes in order."""
    refs: list[fx.Node] = []

    def take(v: Any) -> Any:
        if isinstance(v, fx.Node):
            refs.append(v)
            return Place(len(refs) - 1)
        return v

    return _mapped(value, take), refs


@dataclass(frozen=True)
class Place:
    """Stands for a node in a call's arguments: number `at` of those it reads."""

    at: int


def _mapped(value: Any, leaf: Any) -> Any:
    """Like fx.map_aggregate, for plain containers."""
    if not isinstance(value, _CONTAINERS):
        return leaf(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple([_mapped(v, leaf) for v in value])
    if isinstance(value, list):
        return [_mapped(v, leaf) for v in value]
    if isinstance(value, dict):
        return {k: _mapped(v, leaf) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_mapped(v, leaf) for v in (value.start, value.stop, value.step)))
    return leaf(value)


def filler(call: Any) -> Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """refs → the call's (args, kwargs). Only arguments that contain nodes are rebuilt."""
    args, kwargs = call
    moving = [(i, v) for i, v in enumerate(args) if _places(v)]
    named = [(k, v) for k, v in kwargs.items() if _places(v)]

    def fill(refs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def filled(value: Any) -> Any:
            if type(value) is Place:
                return refs[value.at]
            return _mapped(value, lambda v: refs[v.at] if isinstance(v, Place) else v)

        new = list(args)
        for i, value in moving:
            new[i] = filled(value)
        return tuple(new), {**kwargs, **{k: filled(v) for k, v in named}} if named else kwargs

    return fill


def _places(value: Any) -> bool:
    """Whether a value contains a `Place`."""
    places: list[Any] = []
    _mapped(value, lambda v: places.append(v) if isinstance(v, Place) else None)
    return bool(places)


def split(name: str) -> tuple[str, int]:
    match = NUMBER.match(name)
    return (match[1], int(match[2])) if match else (name, 0)


def head(name: str, path: str | None = None) -> str:
    """A parameter's path without the number at its end, or the name of its placeholder, which ends
    like `path`."""
    match = NUMBER.match(name) if NUMBER.match(name if path is None else path) else None
    return match[1] if match else name
