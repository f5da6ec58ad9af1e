"""Pairs the nodes of a graph with those of a graph with one more layer, and checks each pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphaccel.ir.replication.layers import NUMBER, Item, NotRepeated, Run, head
from graphaccel.ir.replication.numbered import renamed_placeholder

_SAME_META = ("phase", "made_by", "bind")
NAMES = ("origin", "stands_for")


def paired(
    runs: Sequence[Run], run: int, items: Sequence[Item], longer: Sequence[Item]
) -> tuple[list[list[Item]], dict[int, bool]]:
    """For each item its counterpart in the graph of one more layer of `run`, or its two
    counterparts; and for the items of the middle layer whether the copies are in descending
    order."""
    counterparts: list[list[Item]] = [[] for _ in items]
    descending: dict[int, bool] = {}
    at = start = 0
    while start < len(items):
        end = start
        if items[start].middle != run:
            counterparts[start] = [_next(longer, at)]
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
                counterparts[start + offset] = own[::-1] if down else own
                descending[start + offset] = down
            at += 2 * size
        start = end
    if at != len(longer):
        raise NotRepeated(f"another number of nodes with one more layer in {runs[run]}")
    for item, own in zip(items, counterparts, strict=True):
        for copy, counterpart in enumerate(own, 1):
            _check_pair(runs, run, item, counterpart, copy if len(own) > 1 else 0)
    return counterparts, descending


def _next(items: Sequence[Item], at: int) -> Item:
    if at >= len(items):
        raise NotRepeated("fewer nodes with one more layer")
    return items[at]


def _check_pair(runs: Sequence[Run], run: int, item: Item, counterpart: Item, copy: int) -> None:
    """Raises NotRepeated unless `counterpart` is `item` except for its sources and names."""

    def unlike(what: str) -> NotRepeated:
        name = item.path if item.node is None else f"{item.node.name} ({item.path})"
        return NotRepeated(f"{what} of {name} changes with one more layer in {runs[run]}")

    if (counterpart.middle == run) != bool(copy) or (
        not copy and counterpart.middle != item.middle
    ):
        raise unlike("the layer")
    if item.written != repr(counterpart.call) or (item.node is None) != (counterpart.node is None):
        raise unlike("the call")
    if item.kind != counterpart.kind:
        raise unlike("the kind")
    a, b = item.node, counterpart.node
    if a is None or b is None:
        return
    if (a.op, "" if a.op == "placeholder" else a.target) != (
        b.op,
        "" if b.op == "placeholder" else b.target,
    ):
        raise unlike("the op")
    one, other = a.meta.get("val"), b.meta.get("val")
    if one is not other and _metadata(one) != _metadata(other):
        raise unlike("the shape")
    for key in _SAME_META:
        if a.meta.get(key) != b.meta.get(key):
            raise unlike("what is known")
    if item.named:
        named = renamed_placeholder(head(a.name, item.path), item.place, counterpart.place)
        if named != head(b.name, counterpart.path):
            raise unlike("the name")


def _metadata(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), value.device)
    if isinstance(value, (tuple, list)):
        return [_metadata(v) for v in value]
    return value


def numbered_names(item: Item) -> list[tuple[str, str]]:
    """Names that depend on the number of layers: the node's own, those of nodes in its metadata,
    and that of its value."""
    value = [("value", item.value)] if item.value else []
    if item.node is None:
        return value
    if item.named:
        tail = NUMBER.match(item.path)
        return [("tail", f"tail_{tail[2]}")] if tail else []
    named = [(k, item.node.meta[k]) for k in NAMES if item.node.meta.get(k)]
    return [("name", item.node.name), *named, *value]


def numbered_name(item: Item, key: str) -> str:
    """One of these names; "" where there is none."""
    if key == "value" or item.node is None or item.named:
        return dict(numbered_names(item)).get(key, "")
    return item.node.name if key == "name" else item.node.meta.get(key) or ""


def copy_of_node(counterparts: Sequence[Sequence[Item]]) -> dict[fx.Node, tuple[int, int]]:
    """Node of the longer graph → (item, copy), copy 0 for items that are not copied."""
    return {
        counterpart.node: (i, copy if len(own) > 1 else 0)
        for i, own in enumerate(counterparts)
        for copy, counterpart in enumerate(own, 1)
        if counterpart.node is not None
    }
