"""Two numbers for a tensor: its squared norm, and its dot product with a fixed direction.

The direction depends on positions, so that a permuted tensor has another dot product. Both numbers
of a sharded tensor are the sums of those of its shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphaccel.runtime.parameters.layout import ShardLayout

_TILE = 8191
"""Elements of the direction that repeat: a prime, so that no dim is a multiple of it."""

Sums = tuple[float, float]


def sums_of(tensor: Tensor, layout: ShardLayout | None = None) -> Sums:
    """(squared norm, dot product with the direction) of a tensor, or of this rank's shard."""
    flat = tensor.detach().reshape(-1)
    tile = _tile(flat.device)
    if layout is not None:
        along = layout.own(_direction(layout.shape.numel(), tile).view(layout.shape)).reshape(-1)
        wide = flat.double()
        return float(wide.dot(wide)), float(wide.dot(along))
    squares = dots = 0.0
    step = _TILE * max(1, flat.numel() // _TILE // 64)
    for start in range(0, flat.numel(), step):
        wide = flat[start : start + step].double()
        squares += float(wide.dot(wide))
        whole = wide.numel() // _TILE
        rows, rest = wide[: whole * _TILE].view(whole, _TILE), wide[whole * _TILE :]
        factors = _factors(start // _TILE, whole + 1, flat.device)
        dots += float((rows @ tile).dot(factors[:-1]))
        dots += float(rest.dot(tile[: rest.numel()]) * factors[-1])
    return squares, dots


def _tile(device: torch.device) -> Tensor:
    """float64 [_TILE]: cosines, which the direction repeats with a different factor each time."""
    return torch.cos(1.7 * torch.arange(_TILE, dtype=torch.float64, device=device))


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """float64 [count]: the factors of the tiles from `first` on."""
    tiles = torch.arange(first, first + count, dtype=torch.float64, device=device)
    return 1 + 0.5 * torch.cos(0.9 * tiles)


def _direction(count: int, tile: Tensor) -> Tensor:
    """float64 [count]: the direction."""
    return torch.outer(_factors(0, count // _TILE + 1, tile.device), tile).view(-1)[:count]
