"""Placements of a tensor on one mesh axis, and strategies: the placements of one call's tensors.

Placements on one axis of n ranks:
  REPLICATED     every rank has the full tensor
  Shard(d, o)    dim d is viewed as [o, n, size / (o * n)] and rank r has [:, r, :]. outer is 1
                 except where dims were merged (a flattened [batch, sequence] sharded along the
                 sequence) or concatenated (queries, keys and values in one weight)
  Shard(d, by)   which positions of dim d a rank has, and how many, is known at run time: those
                 whose expert it holds. In the graph it has an equal share of them
  PARTIAL        the tensor is the sum of the tensors of all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

LEAST_WIDTH = 8
"""The fewest positions that a rank has of a padded dim."""


@dataclass(frozen=True, order=True)
class Shard:
    """Dim `dim`, viewed as [outer, n, rest], is sharded in its middle.

    padding: positions that the last rank has in excess, where n does not divide the dim.
    by: name of the node that gives the expert of every position, where each rank has the positions
    of its own experts; experts: the number of experts.
    """

    dim: int
    outer: int = 1
    padding: int = 0
    by: str = ""
    experts: int = 0

    def fits(self, shape: Sequence[int], ranks: int) -> bool:
        """Whether a tensor of `shape` can be sharded so over `ranks`, with exactly this padding."""
        if self.dim >= len(shape):
            return False
        if self.by:
            return True
        if self.padding and (self.outer > 1 or self.padding >= ranks):
            return False
        return (shape[self.dim] + self.padding) % (self.outer * ranks) == 0

    def local(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """One rank's shape of a tensor of `shape`."""
        padding = -shape[self.dim] % ranks if self.by else self.padding
        return tuple((n + padding) // ranks if d == self.dim else n for d, n in enumerate(shape))


def shard_of(dim: int, outer: int, shape: Sequence[int], ranks: int) -> Shard:
    """The shard of a dim of `shape`, padded where `ranks` do not divide it."""
    return Shard(dim, outer, -shape[dim] % ranks if outer == 1 else 0)


def passes_in_order(shard: Shard, shape: Sequence[int], ranks: int) -> bool:
    """Whether rows on the ranks of their experts can be exchanged with ranks that have equally many
    of them, in order."""
    return shard.dim == 0 and shape[0] % ranks == 0


Placement: TypeAlias = Shard | str


@dataclass(frozen=True)
class Row:
    """One legal strategy of a call. inputs: placements by position among `tensor_arguments`; None:
    any (not read).

    lowering: name of the rewrite that makes the local call correct where smaller arguments are not
    enough. gathered: values that it sums over the axis itself, in elements of its first output's
    dtype. divided: whether each rank does 1/n of the work.
    """

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]
    lowering: str = ""
    gathered: int = 0
    divided: bool = True


Shards: TypeAlias = frozenset[Shard]


def shards_of(rows: Sequence[Row]) -> tuple[tuple[Shards, ...], tuple[Shards, ...]]:
    """The shards in the strategies of one call: of each tensor it reads, and of each it returns."""
    given, built = zip(*((row.inputs, row.outputs) for row in rows), strict=True)
    return _by_position(given), _by_position(built)


def _by_position(placements: Sequence[Sequence[Placement | None]]) -> tuple[Shards, ...]:
    columns = zip(*placements, strict=True)
    return tuple(frozenset(p for p in column if isinstance(p, Shard)) for column in columns)
