"""Sections before the batch in a merged dim, at the sizes of a batch that is passed.

A value of [sequence * batch] rows has one section for each position of the sequence. A placement
counts them at the sizes of the capture; a longer sequence has more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from graphaccel.capture.symbols import BATCH, evaluate
from graphaccel.sharding.rules.batch_placement import ANY, BatchPlacement, Conflict
from graphaccel.sharding.rules.shard import Shard


def has_sections(node: Any, place: Any, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Whether the number of sections before the batch is known at all sizes. sizes: of the capture.

    Where it depends on them, the dim has to have nothing behind the batch.
    """
    if not isinstance(place, Shard):
        return True
    if place.outer == ANY:
        return False
    rows = node.meta["dims"][place.dim] / BATCH
    return not rows.free_symbols or evaluate(rows, sizes) == place.outer


def resized(
    placed: BatchPlacement,
    captured: Mapping[sympy.Symbol, int],
    sizes: Mapping[sympy.Symbol, int],
) -> BatchPlacement:
    """The placement of a batch of other sizes than those captured.

    Where the head would read a value whose sections are not known then, it is a conflict.
    """
    if all(sizes[s] == n for s, n in captured.items() if s != BATCH):
        return placed
    unknown: list[Conflict] = []

    def each(node: fx.Node, place: Any, dims: Any) -> Any:
        if isinstance(place, tuple):
            return tuple(each(node, p, d) for p, d in zip(place, dims, strict=True))
        if not isinstance(place, Shard) or place.outer == ANY:
            return place
        rows = dims[place.dim] / BATCH
        if rows.free_symbols and evaluate(rows, captured) != place.outer:
            if node in placed.slices or any(user in placed.head for user in node.users):
                unknown.append(Conflict(node, "the batch is inside another dim of another size"))
            return place
        return Shard(place.dim, int(evaluate(rows, sizes))) if rows.free_symbols else place

    places = {n: each(n, p, n.meta.get("dims")) for n, p in placed.places.items()}
    slices = {n: each(n, p, n.meta.get("dims")) for n, p in placed.slices.items()}
    conflicts = (*placed.conflicts, *unknown)
    return replace(placed, places=places, slices=slices, conflicts=conflicts)


def grows(node: fx.Node, place: Any) -> bool:
    """Whether of a value's dims the one of the batch grows with it, and no other does. A constant
    size that the batch happens to fill (`x.view(2, -1, 3)`) does not."""
    at = place.dim if isinstance(place, Shard) else place
    if not isinstance(at, int) or not isinstance(node.meta.get("val"), torch.Tensor):
        return True
    dims = enumerate(node.meta["dims"])
    return [d for d, n in dims if BATCH in getattr(n, "free_symbols", ())] == [at]
