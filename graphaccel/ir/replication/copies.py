"""Builds the copies of one node of a repeated layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from graphaccel.ir.nodes import new_node
from graphaccel.ir.replication.layers import Item, Run, filler, head
from graphaccel.ir.replication.numbered import LayerPath, NumberedName, renamed_placeholder
from graphaccel.ir.replication.pairs import NAMES

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
class Dependence:
    """How one item depends on the number of layers."""

    refs: tuple[Ref, ...]
    names: Mapping[str, NumberedName]
    path: LayerPath
    covers: tuple[NumberedName, ...] = ()


class CopyBuilder:
    """Builds the copies of one item. fixed: fixes the number of layers in a name or path."""

    def __init__(self, item: Item, dependence: Dependence, fixed: Callable[[Any], Any]) -> None:
        self.item = item
        self.names = {name: fixed(expression) for name, expression in dependence.names.items()}
        self.covers = [fixed(expression) for expression in dependence.covers]
        self.place = fixed(dependence.path)
        meta = {} if item.node is None else item.node.meta
        self.meta = {k: v for k, v in meta.items() if k not in _DROPPED}

    @cached_property
    def stack(self) -> tuple[tuple[str, tuple], ...]:
        """The module stack of the item."""
        return tuple(self.meta.get("nn_module_stack", {}).items())

    def path(self, copy: int) -> str:
        """The module or parameter of a copy; without the number at the end, if it is numbered."""
        return self.place.at((), copy)

    def full_path(self, copy: int) -> str:
        """The path of a copy of a node, with the number at the end."""
        return self.path(copy) + self._end(copy)

    def full_paths(self, copies: Sequence[int]) -> list[str]:
        """`full_path` of several copies."""
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
        short = head(item.node.name, item.path)
        return renamed_placeholder(short, item.place, path) + self._end(copy)

    def names_of_copies(self, count: int) -> list[str]:
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
        name, path = self.named(copy), self.full_path(copy)
        target = name if old.op == "placeholder" else old.target
        node = new_node(graph, old.op, target, *call, name, self.meta)
        meta = node.meta
        for key in NAMES:
            if key in self.names:
                meta[key] = self.names[key].at((), copy)
        if self.covers:
            meta["covers"] = tuple(n.at((), copy) for n in self.covers)
        if path != self.item.place:
            if "module" in meta:
                meta["module"] = path
            if self.stack:
                meta["nn_module_stack"] = self._module_stack(stacks, path)
        return node

    def _module_stack(self, stacks: dict[Any, Any], path: str) -> dict[str, tuple]:
        """The module stack of a copy: one for all nodes of its module."""
        key = (self.stack, path)
        if key not in stacks:
            own = self.place.run
            assert own is not None
            number, new = own.number(self.item.place), own.number(path) or 0
            stacks[key] = _module_stack(dict(self.stack), own, number, new)
        return stacks[key]


def _module_stack(
    stack: Mapping[str, tuple], run: Run, number: int | None, new: int
) -> dict[str, tuple]:
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
