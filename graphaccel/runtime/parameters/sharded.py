"""Parameters and gradients of which this rank holds a shard: full shape outside, local shard
inside.

Elementwise ops work on the shard alone; a norm is that of the full tensor (clip_grad_norm_ needs
one small all-reduce for all gradients together); every other op gathers the full tensor first, so
that no op gives a wrong result, only a slow one. Views are recomputed from the full tensor by each
op that reads them, and what is written into one is written into the shard. All ranks run the same
script, so all of them gather.

Not a DTensor: a parameter has to become one in place, or optimizers and schedulers would lose it,
and torch cannot swap a tensor with one that has slots. `presented.py` gives a DTensor of the
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

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.tensors import data_of, without_storage
from graphaccel.compat.torch.tensors import no_torch_function as _no_torch_function
from graphaccel.errors import PartOfModel
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.norms import PendingNorm, resolve
from graphaccel.runtime.parameters.partial_tensors import check_same_kind, copied
from graphaccel.runtime.parameters.readable import Readable, read_by_all

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
}
_NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim}
_EACH = frozenset(
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf "
    "erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero".split()
)
"""List ops (`aten._foreach_<name>`) that treat every element independently."""
_SCALE = "_amp_foreach_non_finite_check_and_unscale_"


class ShardTensor(Readable, torch.Tensor):
    """A tensor of full shape of which `local` is this rank's shard under `sharding`."""

    local: torch.Tensor
    sharding: ShardLayout

    __torch_function__ = _no_torch_function

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: ShardLayout) -> ShardTensor:
        """local: of shape `layout.local_shape`."""
        built = without_storage(cls, layout.shape, local.dtype, local.device)
        built.local, built.sharding = local, layout
        return built

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """As of any tensor. Setting it to a tensor of full shape copies this rank's part of the
        values; raises GraphMisuse (GA407) for another shape or dtype."""
        return data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        check_same_kind(self, value)
        with torch.no_grad():
            self.copy_(value)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The local shard is the inner tensor."""
        return ["local"], self.sharding

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], layout: Any, *_: Any) -> Any:
        return ShardTensor(inner["local"], layout)

    def __repr__(self, **_: Any) -> str:
        return f"ShardTensor({list(self.shape)}, {self.dtype}, {self.sharding.splits})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle: a shard would be another model's. Raises PartOfModel (GA411)."""
        raise self._part_of_model()

    def untyped_storage(self) -> Any:
        """Called by safetensors, which writes this memory. Raises PartOfModel (GA411)."""
        raise self._part_of_model()

    def _part_of_model(self) -> PartOfModel:
        kind = "parameter" if isinstance(self, nn.Parameter) else "tensor"
        return PartOfModel(what=f"a {kind} of shape {list(self.shape)}")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        """A copy of the shard; process groups are shared."""
        return copied(self, ShardTensor(self.local.detach().clone(), self.sharding), memo)

    def whole(self) -> torch.Tensor:
        """The full tensor. Collective over the axes it is sharded over."""
        return read_by_all(lambda: self.sharding.gather(self.local))

    values = whole

    # The protocol of torch.distributed.checkpoint for tensors that know their offsets
    # (torch.distributed._checkpointable): a shard may be several boxes of the full tensor.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """One write item per box."""
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
        """The boxes, with their offsets in the full tensor."""
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
        if func in (aten.detach.default, aten.alias.default):  # of every gradient, every step
            return ShardTensor(func(args[0].local), args[0].sharding)
        return _computed(func, types, args, kwargs or {})


class ShardView(Readable, torch.Tensor):
    """A view of a ShardTensor (`p[0]`, `p.view(-1)`), recomputed by each op from the full tensor.

    look: maps the full tensor to this view of it.
    """

    base: ShardTensor
    look: Callable[[torch.Tensor], torch.Tensor]

    __torch_function__ = _no_torch_function

    @staticmethod
    def __new__(cls, base: ShardTensor, look: Callable[[torch.Tensor], torch.Tensor]) -> ShardView:
        """Strides are those of a contiguous full tensor."""
        shape = look(torch.empty(base.shape, dtype=base.dtype, device="meta"))
        built = without_storage(cls, shape.shape, shape.dtype, base.device, strides=shape.stride())
        built.base, built.look = base, look
        return built

    def __repr__(self, **_: Any) -> str:
        return f"ShardView({list(self.shape)} of {self.base!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the values it views. Collective."""
        return self.values().__reduce_ex__(protocol)

    def values(self) -> torch.Tensor:
        """What it views of the full tensor. Collective."""
        return self.look(self.base.whole())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Ops that read it or write into it."""
        return _computed(func, types, args, kwargs or {})


def local_of(value: Any) -> Any:
    """The shard of a ShardTensor; any other value unchanged."""
    return value.local if isinstance(value, ShardTensor) else value


def _computed(func: Any, types: Sequence[type], args: tuple, kwargs: dict) -> Any:
    if func is aten.copy_.default and any(issubclass(kind, DTensor) for kind in types):
        return _copied(*args)
    if any(_foreign(kind) for kind in types):
        return NotImplemented
    if func._schema.is_mutable:
        _count(args[0])
    views = any(issubclass(kind, ShardView) for kind in types)
    name = func.__name__.split(".")[0]
    if name == "_foreach_norm" and not views:
        return resolve([_norm(t, *args[1:], **kwargs) for t in args[0]])
    if name.startswith("_foreach_") and name.removeprefix("_foreach_").rstrip("_") in _EACH:
        return _each(func, args, kwargs)
    if name == _SCALE:
        return _unscaled(func, *args)
    if views:
        return _on_whole(func, args, kwargs)
    if func in _NORMS and isinstance(args[0], ShardTensor) and _all_dims(args, kwargs):
        return _norm(*args, **kwargs)
    random = torch.Tag.nondeterministic_seeded in func.tags
    if (torch.Tag.pointwise in func.tags and not random) or func in _ELEMENTWISE:
        return _elementwise(func, args, kwargs)
    return _on_whole(func, args, kwargs)


def _count(written: Any) -> None:
    """Count an op that writes into a shard, or into several."""
    first = written[0] if _tensors(written) else written
    shard = first.base if isinstance(first, ShardView) else first
    if isinstance(shard, ShardTensor):
        shard.sharding.mesh.writes.count += 1


def _foreign(kind: type) -> bool:
    """Another tensor subclass, which has to handle this one (RemoteTensor does)."""
    own = issubclass(kind, (ShardTensor, ShardView, PendingNorm))
    return not own and issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, nn.Parameter)


def _all_dims(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    keep = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    return not dims and not keep


def _copied(target: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
    """Copy from a checkpoint: possibly the same memory, otherwise a full tensor sliced to this
    shard."""
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


def _unscaled(func: Any, tensors: Sequence[torch.Tensor], match: Any, scale: Any) -> None:
    """A GradScaler's check: a non-finite value in one shard is reported on every rank."""
    func([local_of(t) for t in tensors], match, scale)
    shards = [t for t in tensors if isinstance(t, ShardTensor)]
    for axes in sorted({t.sharding.axes for t in shards}):
        with answered("whether the gradients of all ranks are finite"):
            dist.all_reduce(match, dist.ReduceOp.MAX, group=shards[0].sharding.mesh.group(axes))


def _each(func: Any, args: tuple, kwargs: dict) -> Any:
    """A foreach op, position by position: on shards where all tensors at a position have the same
    layout, on full tensors otherwise (a full tensor is written, or layouts or shapes differ)."""
    lists = [a for a in (*args, *kwargs.values()) if _tensors(a)]
    writes = func.__name__.split(".")[0].endswith("_")
    layouts = [_common(place, writes) for place in zip(*lists, strict=True)]
    wholes = _Wholes()

    def own(value: Any) -> Any:
        if not _tensors(value):
            return wholes.of(value)
        pairs = zip(value, layouts, strict=True)
        return [wholes.of(t) if layout is None else _part(t, layout) for t, layout in pairs]

    given = [own(a) for a in args]
    results = func(*given, **{k: own(v) for k, v in kwargs.items()})
    if not writes:
        pairs = zip(results, layouts, strict=True)
        return [r if layout is None else _shard(r, layout) for r, layout in pairs]
    for tensor, layout in zip(args[0], layouts, strict=True):
        if layout is None:
            wholes.keep(tensor)
        else:
            layout.clear(tensor.local)
    return None


def _tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _common(tensors: Sequence[torch.Tensor], writes: bool) -> ShardLayout | None:
    """The layout in which an elementwise op can work on the shards of its tensors, if there is one.

    writes: into the first of them.
    """
    shards = [t for t in tensors if isinstance(t, ShardTensor)]
    if not shards or any(isinstance(t, ShardView) for t in tensors):
        return None
    layout = shards[0].sharding
    if writes and not isinstance(tensors[0], ShardTensor):
        return None
    for tensor in tensors:
        if isinstance(tensor, ShardTensor) and tensor.sharding.splits != layout.splits:
            return None
        try:
            if torch.broadcast_shapes(tensor.shape, layout.shape) != layout.shape:
                return None
        except RuntimeError:  # the op itself raises about its shapes
            return None
        if isinstance(tensor, ShardTensor) and tensor.shape != layout.shape:
            return None
    return layout


def _part(tensor: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """This rank's part: the shard, or a slice of a full tensor beside one; numbers unchanged."""
    if isinstance(tensor, ShardTensor):
        return tensor.local
    return tensor if tensor.dim() == 0 else layout.own(tensor.expand(layout.shape))


def _shard(local: torch.Tensor, layout: ShardLayout) -> ShardTensor:
    """Wrap a result as a shard, with its padding zeroed."""
    layout.clear(local)
    return ShardTensor(local, layout)


def _elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    inplace = func.__name__.split(".")[0].endswith("_")
    layout = None
    if "out" not in kwargs and all(r.type.kind() == "TensorType" for r in func._schema.returns):
        layout = _common(tensors, inplace)
    if layout is None:
        return _on_whole(func, args, kwargs)
    own = [_part(leaf, layout) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args_, kwargs_ = pytree.tree_unflatten(own, spec)
    kwargs_.pop("memory_format", None)
    result = func(*args_, **kwargs_)
    if inplace:
        layout.clear(args[0].local)
        return args[0]
    return pytree.tree_map_only(torch.Tensor, lambda t: _shard(t, layout), result)


class _Wholes:
    """The full tensor of each shard that one op reads or writes, shared by all its views."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """The full tensor of a shard, or the view of it; any other value unchanged."""
        if isinstance(value, ShardView):
            return value.look(self.of(value.base))
        if not isinstance(value, ShardTensor):
            return value
        key = (value.local.data_ptr(), id(value.sharding))
        if key not in self._known:
            self._known[key] = value.whole()
        return self._known[key]

    def keep(self, written: Any) -> None:
        """Write what was written into a full tensor back into its shard."""
        shard = written.base if isinstance(written, ShardView) else written
        if isinstance(shard, ShardTensor):
            shard.local.copy_(shard.sharding.own(self.of(shard)))


def _on_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Gather, compute, and write back what was written. A view stays a view."""
    declared = func._schema.arguments
    given = [(a, args[i]) for i, a in enumerate(declared[: len(args)])]
    given += [(a, kwargs[a.name]) for a in declared[len(args) :] if a.name in kwargs]
    shown = [a for a in declared if a.alias_info is not None and not a.alias_info.is_write]
    if shown and isinstance(args[0], (ShardTensor, ShardView)):
        return _views(func, args, kwargs)
    wholes = _Wholes()
    args_, kwargs_ = pytree.tree_map(wholes.of, (args, kwargs))
    result = func(*args_, **kwargs_)
    written = [v for a, v in given if a.alias_info is not None and a.alias_info.is_write]
    for tensor in pytree.tree_leaves(written):
        wholes.keep(tensor)
    if not written or not func._schema.returns:
        return result
    return written[0] if len(written) == 1 else tuple(written)


def _views(func: Any, args: tuple, kwargs: dict) -> Any:
    """The results of a view op, to be computed by the op that reads them."""
    first, *others = args
    base = first.base if isinstance(first, ShardView) else first
    look = first.look if isinstance(first, ShardView) else _itself

    def shown(whole: torch.Tensor) -> Any:
        return func(look(whole), *others, **kwargs)

    several = shown(torch.empty(base.shape, dtype=base.dtype, device="meta"))
    if isinstance(several, torch.Tensor):
        return ShardView(base, shown)
    return [ShardView(base, lambda whole, i=i: shown(whole)[i]) for i in range(len(several))]


def _itself(whole: torch.Tensor) -> torch.Tensor:
    return whole
