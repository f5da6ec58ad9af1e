"""Which dims of a value count the examples of a batch, by their sizes as expressions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphaccel.sharding.rules.batch_placement import (
    ANY,
    PARTIAL,
    Placement,
    placed_at,
    sharded_dim,
)
from graphaccel.sharding.rules.notation import reshaped, shape_of


@dataclass(frozen=True)
class Examples:
    """symbol: the batch's in `meta["dims"]`. size: of the batch in the graph."""

    symbol: Any
    size: int

    def _counts(self, size: Any) -> bool:
        return self.symbol in getattr(size, "free_symbols", ())

    def multiple(self, size: Any) -> bool:
        """Whether a size that depends on the number of examples is a multiple of it."""
        return size.subs(self.symbol, 0) == 0

    def carrying(self, dims: Iterable[Any]) -> list[int]:
        """The dims whose sizes depend on the number of examples."""
        return [dim for dim, size in enumerate(dims) if self._counts(size)]

    def counted_in(self, node: fx.Node) -> bool:
        """Whether the size of a value depends on the number of examples."""
        dims = node.meta["dims"]
        several = isinstance(node.meta["val"], (tuple, list))
        return any(self.carrying(each or ()) for each in (dims if several else (dims,)))

    def rows_of_sums(self, node: fx.Node, outputs: Sequence[Placement]) -> bool:
        """Whether a partial sum has a row for each example."""
        dims = node.meta["dims"]
        if isinstance(node.meta["val"], torch.Tensor):
            dims = (dims,)
        built = [each for each in dims if each is not None]
        pairs = zip(outputs, built, strict=False)
        return any(place == PARTIAL and bool(self.carrying(each)) for place, each in pairs)

    def regrouped(self, node: fx.Node, source: fx.Node, place: Placement) -> Placement | None:
        """The placement of a reshape that merges dims before the batch with it, or splits them off;
        None where it mixes examples. place: of the source."""
        dim, outer = sharded_dim(place) or (0, ANY)
        if outer != ANY:
            result = reshaped(shape_of(source), shape_of(node), dim, outer, self.size)
            return None if result is None else placed_at(*result)
        sizes = node.meta["dims"]
        carry = self.carrying(sizes)
        if len(carry) != 1:
            return None
        return placed_at(carry[0], 1 if sizes[carry[0]] == self.symbol else ANY)
