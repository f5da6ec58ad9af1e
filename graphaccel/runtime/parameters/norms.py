"""Norms of shards that become norms of the full tensors when read, batched in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.tensors import no_torch_function as _no_torch_function
from graphaccel.compat.torch.tensors import without_storage
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.readable import Readable, read_by_all

aten = torch.ops.aten


class PendingNorm(Readable, torch.Tensor):
    """The norm of one shard; becomes the full tensor's norm when it is read or stacked, so that the
    norms of many gradients share an all-reduce."""

    local: torch.Tensor
    sharding: ShardLayout
    order: float
    known: torch.Tensor | None

    __torch_function__ = _no_torch_function

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: ShardLayout, order: float) -> PendingNorm:
        """local: the norm of order `order` of this rank's shard."""
        built = without_storage(cls, (), local.dtype, local.device)
        built.local, built.sharding, built.order, built.known = local, layout, order, None
        return built

    def __repr__(self, **_: Any) -> str:
        return f"PendingNorm({self.dtype}, {self.sharding.axes})"

    def values(self) -> torch.Tensor:
        """The norm of the full tensor. Collective, the first time."""
        (self.known,) = resolve([self])
        return self.known

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.values().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the norm of the full tensor. Collective."""
        return self.values().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """The first op that reads the norm."""
        own = (PendingNorm, torch.Tensor, torch.nn.Parameter)
        if any(issubclass(kind, torch.Tensor) and kind not in own for kind in types):
            return NotImplemented  # shards and remote tensors handle it
        if func in (aten.detach.default, aten.alias.default) and args[0].known is None:
            return PendingNorm(args[0].local, args[0].sharding, args[0].order)
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PendingNorm)]
        for i, known in zip(places, resolve([leaves[i] for i in places]), strict=True):
            leaves[i].known = leaves[i] = known  # what is written in place persists
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return func(*args, **(kwargs or {}))


def resolve(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms with the pending ones reduced: one all-reduce for each set of axes and each order."""
    results = list(norms)
    sets: dict[tuple[str, float], list[int]] = {}
    for i, norm in enumerate(norms):
        if isinstance(norm, PendingNorm) and norm.known is not None:
            results[i] = norm.known
        elif isinstance(norm, PendingNorm):
            sets.setdefault((norm.sharding.axes, norm.order), []).append(i)
    for (axes, order), places in sorted(sets.items()):
        pending = [norms[i] for i in places]
        mesh = pending[0].sharding.mesh  # type: ignore[attr-defined]
        local = torch.stack([n.local for n in pending])  # type: ignore[attr-defined]
        local, group = local.to(mesh.device), mesh.group(axes)  # from the host, if offloaded
        local = read_by_all(partial(_reduced, local, order, group))
        for i, value in zip(places, local.to(pending[0].device).unbind(), strict=True):
            results[i] = value
    return results


def _reduced(local: torch.Tensor, order: float, group: Any) -> torch.Tensor:
    """The norms of all ranks' shards together."""
    if order == float("inf"):
        dist.all_reduce(local, op=dist.ReduceOp.MAX, group=group)
        return local
    powers = local**order
    dist.all_reduce(powers, group=group)
    return powers ** (1.0 / order)
