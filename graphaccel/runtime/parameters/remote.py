"""Placeholders for parameters and gradients on another pipeline rank: full shape, no storage.

Optimizers, schedulers, gradient clipping and `parameters()` see every parameter of the model; those
of other stages are `RemoteTensor`s. In-place arithmetic on one does nothing (its own rank does it),
results are remote too, and reading a number from one is an error. The one number that training
needs from all of them, the total norm, is correct: `clip_grad_norm_` stacks the norms of all
gradients, and stacking a remote norm fetches it (one small all-reduce within the pipeline; every
rank makes the same call). A rank that has all values of a list stacks them without the others,
which then have no part in it: every remote tensor knows which ranks have it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import without_torch_dispatch
from graphaccel.compat.torch.tensors import data_of, no_torch_function, without_storage
from graphaccel.errors import ElsewhereNeeded, PartOfModel
from graphaccel.errors.messages import line_of_script
from graphaccel.runtime.parameters.norms import resolve
from graphaccel.runtime.parameters.partial_tensors import check_same_kind, copied
from graphaccel.runtime.parameters.readable import Readable, read_by_all

aten = torch.ops.aten


@dataclass(frozen=True)
class Elsewhere:
    """Where values are. group: the pipeline's, through which they are fetched. holders: pipeline
    coordinates that have them. shared: coordinate → how many parameters are both there and here."""

    group: Any
    holders: frozenset[int]
    shared: Mapping[int, int] = field(default_factory=dict)


class RemoteTensor(Readable, torch.Tensor):
    """A tensor of another rank: shape, dtype, device, and where its values are."""

    elsewhere: Elsewhere

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, elsewhere: Elsewhere, device: torch.device | None = None
    ) -> RemoteTensor:
        """A placeholder for `like`, on another device if given."""
        built = without_storage(cls, like.shape, like.dtype, device or like.device)
        built.elsewhere = elsewhere
        return built

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """As of any tensor. Setting it changes nothing here: its own rank does it. Raises
        GraphMisuse (GA407) for another shape or dtype."""
        return data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        check_same_kind(self, value)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """No inner tensors: none of it is in this rank's memory."""
        return [], (self.shape, self.dtype, self.device, self.elsewhere)

    @staticmethod
    def __tensor_unflatten__(_inner: Any, context: Any, *_sizes: Any) -> RemoteTensor:
        shape, dtype, device, elsewhere = context
        built = without_storage(RemoteTensor, shape, dtype, device)
        built.elsewhere = elsewhere
        return built

    def __repr__(self, **_: Any) -> str:
        return f"RemoteTensor({list(self.shape)}, {self.dtype})"

    __str__ = __repr__  # also of a number: texts are made of what is in a model

    def values(self) -> torch.Tensor:
        """Raises ElsewhereNeeded (GA408): they are not here."""
        raise _needed(aten._local_scalar_dense.default)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        return copied(self, RemoteTensor(self, self.elsewhere), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle: no values are here. Raises PartOfModel (GA411)."""
        raise PartOfModel(what=f"a parameter of shape {list(self.shape)}")

    def untyped_storage(self) -> Any:
        """Called by safetensors. Raises PartOfModel (GA411)."""
        raise PartOfModel(what=f"a parameter of shape {list(self.shape)}")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Ops with at least one remote tensor among their arguments."""
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: tuple, kwargs: dict) -> Any:
    name = func.__name__.split(".")[0]
    leaves = pytree.tree_leaves((args, kwargs))
    remote = next(leaf for leaf in leaves if isinstance(leaf, RemoteTensor))
    where = _of_all(leaves)
    if func in (aten.stack.default, aten.cat.default):
        if all(t.dim() == 0 for t in args[0]) and _together(func, args[0], where):
            return _stack(func, args[0], remote)
        if not all(isinstance(t, RemoteTensor) for t in args[0]):
            raise _needed(func)  # no rank has all of the values
    if "_foreach_" in name or "_fused_" in name:
        return _on_local(func, args, kwargs, remote)
    if func in (aten.detach.default, aten.alias.default):
        return RemoteTensor(args[0], remote.elsewhere)
    if torch.Tag.nondeterministic_seeded in func.tags:  # its own rank draws, so this one draws too
        given = pytree.tree_map_only(RemoteTensor, _zeros, (args, kwargs))
        func(*given[0], **given[1])
    if torch.Tag.inplace_view in func.tags:
        with without_torch_dispatch():  # it is of another shape then, and has no values
            return func(*args, **kwargs)
    written = [
        kwargs.get(a.name, args[i] if i < len(args) else None)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    if written:
        if not all(isinstance(leaf, RemoteTensor) for leaf in pytree.tree_leaves(written)):
            raise _needed(func)
        return written[0] if len(written) == 1 else tuple(written)
    if func is aten.equal.default and (args[0] is args[1] or args[0].shape != args[1].shape):
        return args[0] is args[1]
    if func in (aten._local_scalar_dense.default, aten.equal.default):
        raise _needed(func)
    shapes = pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
    try:
        result = func(*shapes[0], **{k: v for k, v in shapes[1].items() if k != "device"})
    except NotImplementedError as error:  # ops whose result size depends on values
        raise _needed(func) from error
    device = kwargs.get("device") or remote.device
    if isinstance(device, torch.device) and device.type == "meta":
        return result
    return pytree.tree_map_only(torch.Tensor, lambda t: _remote(t, remote.device, where), result)


def _of_all(values: Iterable[Any]) -> Elsewhere:
    """Where all remote ones of some values are."""
    every = [v.elsewhere for v in values if isinstance(v, RemoteTensor)]
    return replace(every[0], holders=frozenset.intersection(*(one.holders for one in every)))


def _together(func: Any, tensors: Sequence[torch.Tensor], where: Elsewhere) -> bool:
    """Whether every rank of the pipeline comes here with this list: no rank has all of its tensors.

    A rank that has them all never comes here. Raises ElsewhereNeeded (GA408) where that rank may
    exist: those of this rank may all be parameters that it has too.
    """
    own = sum(not isinstance(t, RemoteTensor) for t in tensors)
    if not where.holders or not own:
        return not where.holders
    if own <= max(where.shared.get(there, 0) for there in where.holders):
        raise _needed(func)
    return True


def _needed(func: Any) -> ElsewhereNeeded:
    name = func.__name__.split(".")[0].strip("_").removeprefix("foreach_")
    name = "item" if name == "local_scalar_dense" else name
    return ElsewhereNeeded(op=name, location=line_of_script(), optimizer=_step_memory())


def _step_memory() -> str:
    """The class of the optimizer whose step is on the call stack; "" if none is."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back
    return ""


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _remote(shape: torch.Tensor, device: torch.device, where: Elsewhere) -> RemoteTensor:
    with torch.device(device):
        return RemoteTensor(shape, where, device)


def _stack(func: Any, tensors: Sequence[torch.Tensor], remote: RemoteTensor) -> torch.Tensor:
    """Scalars of all ranks, stacked: each is known on the ranks that hold its tensor, one or
    several.

    The maximum over the ranks is the value, for ranks that do not know it contribute less; whether
    a value is NaN, and whether any rank knows it, is reduced beside it.

    Raises ElsewhereNeeded (GA408) on every rank where none knows a value.
    """
    number = remote.dtype
    wide = number if number.is_floating_point else torch.int64
    least = -float("inf") if number.is_floating_point else torch.iinfo(wide).min
    known = torch.stack(
        [
            torch.full((), least, dtype=wide, device=remote.device)
            if isinstance(t, RemoteTensor)
            else t.detach().to(remote.device, wide)  # possibly from the host
            for t in resolve(tensors)
        ]
    )
    missing = known.isnan()
    here = torch.tensor([not isinstance(t, RemoteTensor) for t in tensors]).to(missing)
    rows = torch.stack([known.masked_fill(missing, least), missing.to(wide), here.to(wide)])
    read_by_all(partial(_largest, rows, remote))
    if not bool(rows[2].all()):
        raise _needed(func)
    values = rows[0].to(number)
    return values.masked_fill(rows[1] > 0, float("nan")) if number.is_floating_point else values


def _largest(values: torch.Tensor, remote: RemoteTensor) -> None:
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=remote.elsewhere.group)


def _on_local(func: Any, args: tuple, kwargs: dict, remote: RemoteTensor) -> Any:
    """A foreach op on those positions at which every list has a tensor of this rank."""
    lists = [
        a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
    ]
    count = max(len(x) for x in lists)
    places = [[x[i] for x in lists if len(x) == count] for i in range(count)]
    here = [i for i, p in enumerate(places) if not any(isinstance(t, RemoteTensor) for t in p)]
    writes = func.__name__.split(".")[0].endswith("_")
    if writes and not all(i in here or isinstance(lists[0][i], RemoteTensor) for i in range(count)):
        raise _needed(func)

    def kept(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            return [value[i] for i in here]
        return value

    results = None
    if here:
        results = func(*(kept(a) for a in args), **{k: kept(v) for k, v in kwargs.items()})
    if "_amp_foreach_" in func.__name__ and _together(func, args[0], _of_all(args[0])):
        # whether all are finite: the same on every rank
        read_by_all(partial(_largest, args[1], remote))
    if writes or not func._schema.returns:
        return None
    collected = dict(zip(here, results or (), strict=True))
    shapes = func(*pytree.tree_map_only(torch.Tensor, _meta, args), **kwargs)
    return [
        collected[i] if i in collected else _remote(shapes[i], remote.device, _of_all(places[i]))
        for i in range(count)
    ]
