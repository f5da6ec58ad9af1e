"""Which layer each node of a graph belongs to, where layers of a model are alike.

A run is a row of identical layers. `items_of` takes a graph apart for `ir.repeat`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from torch import fx

from graphaccel.ir.values import module_path

KEPT = 3
"""Layers of a run in the graph that is repeated: the first, the one that is copied, the last."""

NUMBER = re.compile(r"^(.*)_(\d+)$", re.DOTALL)


class NotRepeated(Exception):
    """The layers do not repeat: said in the log, and the whole model is captured."""


@dataclass(frozen=True)
class Run:
    """Identical layers: entries `first` to `first + count - 1` of the container at `path`."""

    path: str
    first: int
    count: int

    def number(self, name: str) -> int | None:
        """Which entry of the container a module path or parameter name lies in, from the run's
        first one on; None if in none."""
        prefix = f"{self.path}." if self.path else ""
        if not name.startswith(prefix):
            return None
        head = name[len(prefix) :].partition(".")[0]
        return int(head) - self.first if head.isdigit() else None

    def renamed(self, name: str, kept: int, copy: int) -> str:
        """What a name among `kept` layers is called among `count`. copy: of the middle layer."""
        number = self.number(name)
        if number is None or number < 1:
            return name
        return self.entry(name, copy if number == 1 else number + self.count - kept)

    def entry(self, name: str, number: int) -> str:
        """A name in the container, in another entry of it."""
        prefix = f"{self.path}." if self.path else ""
        rest = name[len(prefix) :].partition(".")[1:]
        return f"{prefix}{number + self.first}{''.join(rest)}"


def copies(runs: Sequence[Run], name: str, kept: int = KEPT) -> list[str]:
    """What a module path or parameter name of `kept` layers is called among all of them."""
    own = next((r for r in runs if r.number(name) == 1), None)
    found = []
    for copy in range(1, 2 if own is None else own.count - kept + 2):
        each = name
        for run in runs:
            each = run.renamed(each, kept, copy)
        found.append(each)
    return found


@dataclass(frozen=True)
class Layered:
    """A graph, and the names of what its first placeholders and its results are ("" for those that
    belong to no layer); what else they are, which layers do not change. numbered: placeholders that
    are not called after those names; none if empty."""

    graph: fx.Graph
    inputs: Sequence[str]
    outputs: Sequence[str]
    input_kinds: Sequence[object]
    output_kinds: Sequence[object]
    numbered: Sequence[bool] = ()


@dataclass(eq=False)
class Item:
    """A node, or one of the graph's results (node None). path: of its module or parameter.
    middle: the run whose middle layer it is part of, -1 for none, and which copy. named: it is a
    placeholder that is called after its path."""

    node: fx.Node | None
    path: str
    section: str
    call: Any
    refs: list[fx.Node]
    kind: object = None
    middle: int = -1
    copy: int = 0
    named: bool = False

    @property
    def place(self) -> str:
        """The path, without the number at the end of names that are counted."""
        return head(self.path) if self.named else self.path


def items_of(layered: Layered, runs: Sequence[Run], copied: Sequence[int]) -> list[Item]:
    """Nodes and results in order, with the copy of which middle layer they belong to. copied: how
    many there are of each run.

    Between two nodes of a layer everything belongs to it, and so does what follows up to the next.
    """
    items: list[Item] = []
    numbered = layered.numbered or (False,) * len(layered.inputs)
    inputs = iter(zip(layered.inputs, layered.input_kinds, numbered, strict=True))
    for node in layered.graph.nodes:
        if node.op == "placeholder":
            name, kind, number = next(inputs, ("", None, False))
            items.append(Item(node, name, "input", ((), {}), [], kind, named=not number))
        elif node.op != "output":
            call, refs = taken((node.args, node.kwargs))
            section = node.meta.get("phase", "forward")
            items.append(
                Item(node, node.meta.get("module") or module_path(node), section, call, refs)
            )
    results: Any = layered.graph.output_node().args[0]
    specs = zip(layered.outputs, layered.output_kinds, strict=True)
    for value, (name, kind) in zip(results, specs, strict=True):
        call, refs = taken(((value,), {}))
        items.append(Item(None, name, "result", call, refs, kind))
    for _, row in groupby(items, lambda item: item.section):
        for item, layer in _layers(list(row), runs):
            if layer is not None and 1 <= layer[1] <= copied[layer[0]]:
                item.middle, item.copy = layer
    return items


def _neighbours(layer: tuple[int, int] | None) -> tuple[tuple[int, int], ...]:
    return () if layer is None else ((layer[0], layer[1] - 1), (layer[0], layer[1] + 1))


def _layers(
    items: Sequence[Item], runs: Sequence[Run]
) -> Iterator[tuple[Item, tuple[int, int] | None]]:
    """The items of a section, each with the (run, entry) it belongs to, None before the first.

    Calls of an entry that has been, within its neighbour, are that one's: a pass moved them there.
    """
    own: list[tuple[int, int] | None] = []
    for item in items:
        numbers = ((r, run.number(item.path)) for r, run in enumerate(runs))
        found = [(r, number) for r, number in numbers if number is not None]
        own.append(found[-1] if found else own[-1] if own else None)
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


def taken(value: Any) -> tuple[Any, list[fx.Node]]:
    """A call's arguments with places for nodes, and the nodes in order."""
    refs: list[fx.Node] = []

    def take(v: Any) -> Any:
        if isinstance(v, fx.Node):
            refs.append(v)
            return _Place(len(refs) - 1)
        return v

    return _mapped(value, take), refs


@dataclass(frozen=True)
class _Place:
    at: int


def _mapped(value: Any, leaf: Any) -> Any:
    """Like fx.map_aggregate, in plain containers."""
    if isinstance(value, slice):
        return slice(*(_mapped(v, leaf) for v in (value.start, value.stop, value.step)))
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_mapped(v, leaf) for v in value)
    if isinstance(value, list):
        return [_mapped(v, leaf) for v in value]
    if isinstance(value, dict):
        return {k: _mapped(v, leaf) for k, v in value.items()}
    return leaf(value)


def filler(call: Any) -> Any:
    """refs → the call's (args, kwargs)."""
    return lambda refs: _mapped(call, lambda v: refs[v.at] if isinstance(v, _Place) else v)


def split(name: str) -> tuple[str, int]:
    found = NUMBER.match(name)
    return (found[1], int(found[2])) if found else (name, 0)


def head(name: str, path: str | None = None) -> str:
    """A parameter's path without the number at its end, or the name of its placeholder, which ends
    as `path` does."""
    found = NUMBER.match(name) if NUMBER.match(name if path is None else path) else None
    return found[1] if found else name
