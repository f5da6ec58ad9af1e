"""Parameters and gradients that lie on another pipeline rank: full shape here, no storage.

Optimizers, schedulers, gradient clipping and `parameters()` see every parameter of the model; those
of other stages are `RemoteTensor`s. In-place arithmetic on one does nothing (its own rank does it),
results are remote again, and reading a number from one is an error. The one number that training
needs from all of them, the total norm, is right: `clip_grad_norm_` stacks the norms of all
gradients, and stacking a remote norm fetches it (one small all-reduce within the pipeline; every
rank calls it alike).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.compat.torch import pytree, without_storage
from graphaccel.errors import GraphMisuse, PartOfModel
from graphaccel.runtime.sharded import PendingNorm, ShardTensor, resolve

aten = torch.ops.aten


class RemoteTensor(torch.Tensor):
    """A tensor of another rank: shape, dtype and device, and the group it can be asked through."""

    group: Any

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, group: Any, device: torch.device | None = None
    ) -> RemoteTensor:
        """A stand-in for `like`, on another device if that is said."""
        made = without_storage(cls, like.shape, like.dtype, device or like.device)
        made.group = group
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """No tensors inside: nothing of it lies in this rank's memory."""
        return [], (self.shape, self.dtype, self.device, self.group)

    @staticmethod
    def __tensor_unflatten__(_inner: Any, context: Any, *_sizes: Any) -> RemoteTensor:
        shape, dtype, device, group = context
        made = without_storage(RemoteTensor, shape, dtype, device)
        made.group = group
        return made

    def __repr__(self, **_: Any) -> str:
        return f"RemoteTensor({list(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Nothing of it is here. Raises PartOfModel (GA411)."""
        raise PartOfModel(what=f"a parameter of shape {list(self.shape)}")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Ops with at least one remote tensor among their arguments."""
        kwargs = kwargs or {}
        if any(issubclass(kind, (ShardTensor, PendingNorm)) for kind in types):
            return _beside_shards(func, args, kwargs)
        if func is aten.stack.default:
            return _stack(args[0])
        if "_foreach_" in func.__name__ or "_fused_" in func.__name__:
            return _on_local(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            raise GraphMisuse(
                what="the value of a tensor that lies on another pipeline rank was read",
                help_line="graphaccel.full_state_dict(model) brings every parameter to this rank",
            )
        remote = next(a for a in _flat(args, kwargs) if isinstance(a, RemoteTensor))
        if func in (aten.detach.default, aten.alias.default):
            return RemoteTensor(args[0], remote.group)
        if func.__name__.split(".")[0].endswith("_"):
            if not isinstance(args[0], RemoteTensor):
                raise GraphMisuse(
                    what=f"{func.__name__} writes a tensor of another pipeline rank into one of "
                    "this rank",
                    help_line="graphaccel.full_state_dict(model) brings every parameter here",
                )
            return args[0]
        shapes = pytree.tree_map_only(torch.Tensor, lambda t: _meta(t), (args, kwargs))
        try:
            result = func(*shapes[0], **{k: v for k, v in shapes[1].items() if k != "device"})
        except NotImplementedError as error:  # ops whose result is not a tensor: equal, nonzero
            raise GraphMisuse(
                what=f"{func} needs the values of a tensor that lies on another pipeline rank",
                help_line="graphaccel.full_state_dict(model) brings every parameter to this rank",
            ) from error
        device = kwargs.get("device") or remote.device
        if isinstance(device, torch.device) and device.type == "meta":
            return result
        return pytree.tree_map_only(torch.Tensor, lambda t: _remote(t, remote), result)


def _beside_shards(func: Any, args: tuple, kwargs: dict) -> Any:
    """Lists that hold shards too, as gradient clipping makes them; other ops have one of both."""
    if func is aten.stack.default:
        return _stack(resolve(args[0]))
    if "_foreach_" in func.__name__ or "_fused_" in func.__name__:
        return _on_local(func, args, kwargs)
    whole = pytree.tree_map_only(ShardTensor, lambda t: t.whole(), (args, kwargs))
    return func(*whole[0], **whole[1])


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _remote(shape: torch.Tensor, like: RemoteTensor) -> RemoteTensor:
    with torch.device(like.device):
        made = without_storage(RemoteTensor, shape.shape, shape.dtype, like.device)
    made.group = like.group
    return made


def _flat(args: tuple, kwargs: dict) -> list[Any]:
    return pytree.tree_leaves((args, kwargs))


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers of all ranks, stacked: each is known where its tensor lies. They are norms: the
    largest of (norm, 0, 0, ...) is the norm, however many ranks know it."""
    remote = next(t for t in tensors if isinstance(t, RemoteTensor))
    if remote.dim() != 0:
        raise GraphMisuse(what="tensors of several pipeline ranks were stacked", help_line="")
    known = torch.stack(
        [
            torch.zeros((), dtype=t.dtype, device=t.device)
            if isinstance(t, RemoteTensor)
            else t.detach().to(remote.device)  # from the host, perhaps
            for t in tensors
        ]
    )
    known = torch.nan_to_num(known, nan=float("inf"), posinf=float("inf"))
    dist.all_reduce(known, op=dist.ReduceOp.MAX, group=remote.group)
    return known


def _on_local(func: Any, args: tuple, kwargs: dict) -> Any:
    """A list op on those positions at which every list has a tensor of this rank."""
    lists = [
        a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
    ]
    count = max(len(x) for x in lists)
    here = [
        i
        for i in range(count)
        if not any(len(x) == count and isinstance(x[i], RemoteTensor) for x in lists)
    ]

    def kept(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            return [value[i] for i in here]
        return value

    results = (
        func(*(kept(a) for a in args), **{k: kept(v) for k, v in kwargs.items()}) if here else []
    )
    if not isinstance(results, (list, tuple)):
        return results
    found = dict(zip(here, results, strict=True))
    sample = lists[0]
    remote = next(t for x in lists for t in x if isinstance(t, RemoteTensor))
    return [found[i] if i in found else RemoteTensor(sample[i], remote.group) for i in range(count)]
