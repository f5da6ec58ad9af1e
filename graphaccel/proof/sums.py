"""Two numbers for a tensor: its squared norm, and its dot product with a fixed direction.

The direction depends on positions, so that a permuted tensor has another dot product. Both numbers
of a sharded tensor are the sums of those of its shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.runtime.parameters.layout import Layout

_TILE = 8191
"""Elements of the direction that are computed once: a prime, so that no dim is a multiple of it."""

Sums = tuple[float, float]


def sums_of(tensor: Tensor, layout: Layout | None = None) -> Sums:
    """(squared norm, dot product with the direction) of a tensor, or of this rank's shard."""
    flat = tensor.detach().reshape(-1)
    if layout is None:
        tiles = -(-flat.numel() // _TILE)
        parts = [flat[i : i + _chunk(tiles)] for i in range(0, flat.numel(), _chunk(tiles))]
        along = (_direction(i * _chunk(tiles), p.numel(), p.device) for i, p in enumerate(parts))
    else:
        whole = _direction(0, layout.shape.numel(), tensor.device).view(layout.shape)
        parts, along = [flat], iter([layout.own(whole).reshape(-1)])
    squares = dots = 0.0
    for part, direction in zip(parts, along, strict=True):
        wide = part.double()
        squares += float(wide.dot(wide))
        dots += float(wide.dot(direction))
    return squares, dots


def _chunk(tiles: int) -> int:
    """How many elements to widen at a time: few enough to need little memory beside the tensor."""
    return _TILE * max(1, tiles // 64)


def _direction(start: int, count: int, device: torch.device) -> Tensor:
    """float64 [count]: the direction from element `start` on, which is a multiple of a tile.

    It is a tile of cosines, repeated with a different factor each time.
    """
    tiles = torch.arange(start // _TILE, (start + count - 1) // _TILE + 1, device=device)
    factors = 1 + 0.5 * torch.cos(0.9 * tiles.double())
    tile = torch.cos(1.7 * torch.arange(_TILE, dtype=torch.float64, device=device))
    return torch.outer(factors, tile).view(-1)[:count]
