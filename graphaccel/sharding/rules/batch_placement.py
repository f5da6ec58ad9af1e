"""Where the batch is in the values of a graph split over it: replicated, sharded or partial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphaccel.sharding.rules.shard import Shard

REPLICATED = "replicated"
PARTIAL = "partial"
WHOLE_SUM = "it needs a sum over the whole batch at once"
NO_RULE = "has no sharding rule"
"""The end of a conflict's reason where no table has a rule for the op."""
Placement = str | int | Shard
"""An int: sharded on that tensor dim, whose outermost part is the batch. A Shard: on a dim with
`outer` sections before the batch, each of them with all examples."""
ANY = 0
"""`outer` of a merged dim whose values are the same for every example, wherever the batch is in
it."""


@dataclass(frozen=True)
class Conflict:
    """A node at which examples of the batch mix, and the reason."""

    node: fx.Node
    reason: str


@dataclass(frozen=True)
class BatchPlacement:
    """Result of `sharding.rules.propagate.place_batch`.

    places: placement per node (a tuple for several outputs).
    hoisted, reduced: values converted from a partial sum to the full sum.
    shared: (user, position among its tensor arguments) where a replicated value is divided by the
    number of parts.
    conflicts: where the batch cannot be split at all.
    head: nodes that run once on the whole batch; first: of them, with the reason. slices: values of
    the whole batch, from the head or hoisted, of which a part reads its own slice.
    """

    places: Mapping[fx.Node, Any] = field(repr=False)
    hoisted: tuple[fx.Node, ...]
    reduced: tuple[fx.Node, ...]
    shared: frozenset[tuple[fx.Node, int]]
    conflicts: tuple[Conflict, ...]
    head: frozenset[fx.Node] = frozenset()
    slices: Mapping[fx.Node, Placement] = field(default_factory=dict)
    first: Conflict | None = None


def sharded_dim(place: Placement) -> tuple[int, int] | None:
    """The sharded dim of a value and the sections before the batch in it; None if not sharded."""
    if isinstance(place, int):
        return place, 1
    return (place.dim, place.outer) if isinstance(place, Shard) else None


def placed_at(dim: int, outer: int) -> Placement:
    return dim if outer == 1 else Shard(dim, outer)
