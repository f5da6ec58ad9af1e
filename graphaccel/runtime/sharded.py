"""Parameters and gradients of which this rank has a shard: full shape outside, one piece inside.

What is elementwise works on the shard alone; a norm is that of the whole (clip_grad_norm_ needs one
small all-reduce for all gradients together); everything else gathers the whole first, so that no
op gives a wrong answer, only a slow one. All ranks run the same script, so all of them gather.

Not a DTensor: a parameter has to become one in place, or optimizers and schedulers would lose it,
and torch can not swap a tensor with one that has slots. `state.as_dtensor` gives a DTensor of the
same memory, for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from graphaccel.compat.torch import no_torch_function as _no_torch_function
from graphaccel.compat.torch import pytree, without_storage
from graphaccel.errors import PartOfModel
from graphaccel.runtime.layout import Layout

aten = torch.ops.aten
_ELEMENTWISE = {
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.detach.default,
    aten.alias.default,
}
_NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim}


class ShardTensor(torch.Tensor):
    """A tensor of which `local` is this rank's shard under `sharding`."""

    local: torch.Tensor
    sharding: Layout

    __torch_function__ = _no_torch_function

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: Layout) -> ShardTensor:
        """local: of shape `layout.local_shape`."""
        made = without_storage(cls, layout.shape, local.dtype, local.device)
        made.local, made.sharding = local, layout
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The shard is what lies in this rank's memory."""
        return ["local"], self.sharding

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], layout: Any, *_: Any) -> Any:
        return ShardTensor(inner["local"], layout)

    def __repr__(self, **_: Any) -> str:
        return f"ShardTensor({list(self.shape)}, {self.dtype}, {self.sharding.splits})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the plain shard: process groups stay where they are. A parameter is refused:
        read again it would be another model's (GA411)."""
        if isinstance(self, nn.Parameter):
            raise PartOfModel(what=f"a parameter of shape {list(self.shape)}")
        return self.local.detach().__reduce_ex__(protocol)

    def whole(self) -> torch.Tensor:
        """All of it. Collective over the axes it is split over."""
        return self.sharding.gather(self.local)

    # What torch.distributed.checkpoint asks of a tensor that knows where its parts belong
    # (torch.distributed._checkpointable): a shard may be several boxes of the whole.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """One item a box."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=box,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for number, box in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes, where they lie in the whole."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, _, sizes in self.sharding.pieces()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """One box, as a view of the shard."""
        for offsets, places, sizes in self.sharding.pieces():
            if index.offset is not None and torch.Size(offsets) == index.offset:
                view = self.local
                for dim, (place, size) in enumerate(zip(places, sizes, strict=True)):
                    view = view.narrow(dim, place, size)
                return view
        raise ValueError(f"{index} is no part of {self!r}")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Ops with at least one shard among their arguments."""
        kwargs = kwargs or {}
        if func is aten.detach.default:  # autograd's, of every gradient in every step
            return ShardTensor(func(args[0].local), args[0].sharding)
        if func is aten.copy_.default and any(issubclass(kind, DTensor) for kind in types):
            return _copied(*args)
        if any(_foreign(kind) for kind in types):
            return NotImplemented
        if func.__name__.startswith("_foreach_norm"):
            return resolve([_norm(t, *args[1:], **kwargs) for t in args[0]])
        if "_foreach_" in func.__name__:
            return _each(func, args, kwargs)
        if func in _NORMS and isinstance(args[0], ShardTensor) and _all_dims(args, kwargs):
            return _norm(*args, **kwargs)
        if torch.Tag.pointwise in func.tags or func in _ELEMENTWISE:
            return _elementwise(func, args, kwargs)
        return _on_whole(func, args, kwargs)


class PendingNorm(torch.Tensor):
    """The norm of one shard, that becomes that of the whole when it is read or stacked: norms of
    many gradients then travel together."""

    local: torch.Tensor
    sharding: Layout
    order: float

    __torch_function__ = _no_torch_function

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: Layout, order: float) -> PendingNorm:
        """local: the norm of order `order` of this rank's shard."""
        made = without_storage(cls, (), local.dtype, local.device)
        made.local, made.sharding, made.order = local, layout, order
        return made

    def __repr__(self, **_: Any) -> str:
        return f"PendingNorm({self.dtype}, {self.sharding.axes})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """The first op that reads it."""
        if any(_foreign(kind) for kind in types):
            return NotImplemented
        if func in (aten.detach.default, aten.alias.default):
            return PendingNorm(args[0].local, args[0].sharding, args[0].order)
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, PendingNorm)]
        for i, known in zip(places, resolve([leaves[i] for i in places]), strict=True):
            leaves[i] = known
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return func(*args, **(kwargs or {}))


def resolve(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms with the pending ones known: one all-reduce for each set of axes and each order."""
    found = list(norms)
    sets: dict[tuple[str, float], list[int]] = {}
    for i, norm in enumerate(norms):
        if isinstance(norm, PendingNorm):
            sets.setdefault((norm.sharding.axes, norm.order), []).append(i)
    for (axes, order), places in sorted(sets.items()):
        pending = [norms[i] for i in places]
        mesh = pending[0].sharding.mesh  # type: ignore[attr-defined]
        local = torch.stack([n.local for n in pending])  # type: ignore[attr-defined]
        local, group = local.to(mesh.device), mesh.group(axes)  # of what may lie on the host
        if order == float("inf"):
            dist.all_reduce(local, op=dist.ReduceOp.MAX, group=group)
        else:
            local = local**order
            dist.all_reduce(local, group=group)
            local = local ** (1.0 / order)
        for i, value in zip(places, local.to(pending[0].device).unbind(), strict=True):
            found[i] = value
    return found


def local_of(value: Any) -> Any:
    """The shard of a ShardTensor, anything else as it is."""
    return value.local if isinstance(value, ShardTensor) else value


def _foreign(kind: type) -> bool:
    """Another tensor subclass, which has to know about this one (RemoteTensor does)."""
    own = issubclass(kind, (ShardTensor, PendingNorm))
    return not own and issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, nn.Parameter)


def _all_dims(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keep = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    return not dims and not keep


def _copied(target: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
    """From a checkpoint: perhaps the very same memory, otherwise all of it and then this part."""
    if isinstance(source, DTensor) and isinstance(target, ShardTensor):
        same = source.to_local().data_ptr() == target.local.data_ptr()
        return target if same else target.copy_(source.full_tensor())
    assert isinstance(source, ShardTensor)
    return target.copy_(source.whole())


def _norm(tensor: torch.Tensor, order: Any = 2.0, *_: Any, dtype: Any = None, **__: Any) -> Any:
    order = 2.0 if order is None else float(order)
    if order in (0.0, float("-inf")):
        whole = tensor.whole() if isinstance(tensor, ShardTensor) else tensor
        return torch.linalg.vector_norm(whole, order, dtype=dtype)
    norm = torch.linalg.vector_norm(local_of(tensor), order, dtype=dtype)
    return PendingNorm(norm, tensor.sharding, order) if isinstance(tensor, ShardTensor) else norm


def _each(func: Any, args: tuple, kwargs: dict) -> Any:
    """A list op, on shards: tensor by tensor where a list mixes layouts with whole tensors."""
    lists = [a for a in (*args, *kwargs.values()) if _tensors(a)]
    layouts = [
        next((x[i].sharding for x in lists if isinstance(x[i], ShardTensor)), None)
        for i in range(len(lists[0]))
    ]

    def own(value: Any) -> Any:
        if not _tensors(value):
            return value
        return [
            t.local if isinstance(t, ShardTensor) else t if layout is None else _cut(t, layout)
            for t, layout in zip(value, layouts, strict=True)
        ]

    results = func(*(own(a) for a in args), **{k: own(v) for k, v in kwargs.items()})
    for i, layout in enumerate(layouts):
        if layout is not None and isinstance(lists[0][i], ShardTensor):
            layout.clear(lists[0][i].local)
    if not isinstance(results, (list, tuple)):
        return results
    return [
        r if layout is None else ShardTensor(r, layout)
        for r, layout in zip(results, layouts, strict=True)
    ]


def _tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _cut(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a whole tensor that stands beside a shard; numbers stay."""
    if tensor.dim() == 0:
        return tensor
    return layout.own(tensor.expand(layout.shape))


def _elementwise(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shards = [leaf for leaf in leaves if isinstance(leaf, ShardTensor)]
    layout = shards[0].sharding
    inplace = func.__name__.split(".")[0].endswith("_")  # type: ignore[attr-defined]
    same = all(s.sharding.splits == layout.splits and s.shape == layout.shape for s in shards)
    fits = all(
        torch.broadcast_shapes(leaf.shape, layout.shape) == layout.shape
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )
    if not same or not fits or (inplace and not isinstance(args[0], ShardTensor)):
        return _on_whole(func, args, kwargs)
    own = [
        leaf.local
        if isinstance(leaf, ShardTensor)
        else _cut(leaf, layout)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    args_, kwargs_ = pytree.tree_unflatten(own, spec)
    kwargs_.pop("memory_format", None)
    result = func(*args_, **kwargs_)
    if inplace:
        args[0].sharding.clear(args[0].local)
        return args[0]
    return pytree.tree_map_only(torch.Tensor, lambda t: ShardTensor(t, layout), result)


def _on_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Gather, compute, and put back what was written in place."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    whole = [leaf.whole() if isinstance(leaf, ShardTensor) else leaf for leaf in leaves]
    args_, kwargs_ = pytree.tree_unflatten(whole, spec)
    result = func(*args_, **kwargs_)
    written = kwargs.get("out", args[0] if args else None)
    if func.__name__.split(".")[0].endswith("_") or "out" in kwargs:
        if isinstance(written, ShardTensor):
            source = kwargs_["out"] if "out" in kwargs else args_[0]
            written.local.copy_(written.sharding.own(source))
            return written
    return result
