"""Dropout on a sharded tensor: the same call on every rank, with other random numbers on each.

All ranks of a mesh axis share one state of the default generator, so that a replicated tensor gets
the same mask everywhere. For a shard, every rank draws one number from it (which keeps the states
equal) and seeds a generator of its own with that number and its coordinate.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("graphaccel::dropout_part", mutates_args=())
def dropout_part(x: torch.Tensor, p: float, coordinate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout of rank `coordinate`'s part of a tensor: (x * mask / (1 - p), mask), mask bool."""
    seed = int(torch.randint(2**62, ()).item())
    generator = torch.Generator(device=x.device).manual_seed((seed + 7919 * coordinate) % 2**63)
    mask = torch.empty_like(x, dtype=torch.float32).bernoulli_(1 - p, generator=generator).bool()
    return x * mask / (1 - p) if p < 1 else torch.zeros_like(x), mask


@dropout_part.register_fake
def _(x: torch.Tensor, p: float, coordinate: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


DROPOUT_PART = torch.ops.graphaccel.dropout_part.default
