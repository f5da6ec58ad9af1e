"""Calls on fake tensors, of which each distinct one runs once in a fake mode.

The layers of a model repeat their calls, and so do the passes, which propagate fake values through
the same step about ten times. A fake mode caches results too, but to look one up takes it longer
than to describe the arguments here.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from graphaccel.compat.torch.fakes import FakeTensor, fake_view, new_fake, results_of
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir.fakes import PLAIN

_PLAIN = frozenset(PLAIN)
_OP = type(torch.ops.aten.add.Tensor)
_CONSTANT = (int, float, bool, str, type(None))


class _Layout(NamedTuple):
    """The metadata of a strided tensor; offset in elements."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _New(NamedTuple):
    """A result with storage of its own. like: of the first call."""

    like: FakeTensor


class _View(NamedTuple):
    """A result in the storage of tensor argument number `of`."""

    of: int
    layout: _Layout


class _Argument(NamedTuple):
    """Tensor argument number `of` itself."""

    of: int


class _NotCached(Exception):
    """A call whose results its op and the metadata of its arguments do not determine."""


def fake_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target(*args, **kwargs)`, inside the fake mode of its tensors.

    Not run where an equal call was: of the same op, on tensors of equal metadata, with equal other
    arguments. Then the results are new tensors, or views of its own arguments, as those of the
    other call. What writes, has no tensor arguments, returns symbolic sizes, or shares storage
    between arguments or results runs each time.
    """
    given: list[FakeTensor] = []
    try:
        key = _key(target, args, kwargs, given)
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            raise _NotCached
    except _NotCached:
        return target(*args, **kwargs)
    known = results_of(given[0].fake_mode)
    if key in known:
        return _rebuilt(known[key], given)
    result = target(*args, **kwargs)
    try:
        known[key] = _described(result, given, set())
    except _NotCached:
        pass
    return result


def _key(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[FakeTensor]
) -> Hashable:
    """The key of a call; its tensors are appended to `given`. Raises _NotCached."""
    if type(target) is not _OP or target._schema.is_mutable:
        raise _NotCached
    if target is torch.ops.aten.as_strided.default:  # refuses by the size of the storage
        raise _NotCached
    key = target, torch.get_default_dtype(), _argument(args, given), *_named(kwargs, given)
    if not given:
        raise _NotCached
    return key


def _named(kwargs: dict[str, Any], given: list[FakeTensor]) -> tuple[Hashable, ...]:
    return tuple((name, _argument(value, given)) for name, value in kwargs.items())


def _argument(value: Any, given: list[FakeTensor]) -> Hashable:
    """A key of an argument; 1, 1.0 and True differ."""
    kind = type(value)
    if kind is FakeTensor:
        given.append(value)
        return _layout(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (tuple, list)):
        return isinstance(value, tuple), *[_argument(one, given) for one in value]
    raise _NotCached


def _layout(tensor: FakeTensor) -> _Layout:
    shape, stride = tuple(tensor.shape), tensor.stride()
    offset: Any = tensor.storage_offset()
    if tensor.constant is not None or tensor.is_conj() or tensor.is_neg():
        raise _NotCached
    if not all(type(n) is int for n in (*shape, *stride, offset)):
        raise _NotCached
    return _Layout(tensor.dtype, tensor.fake_device, shape, stride, offset)


def _described(value: Any, given: list[FakeTensor], seen: set[int]) -> Any:
    """What a result is rebuilt from. seen: storages of other new results. Raises _NotCached."""
    if isinstance(value, (tuple, list)):
        return type(value)([_described(one, given, seen) for one in value])
    if type(value) in _CONSTANT:
        return value
    if type(value) is not FakeTensor or value.layout != torch.strided:
        raise _NotCached
    same = [i for i, tensor in enumerate(given) if tensor is value]
    storage = storage_key(value)
    owners = {id(t): i for i, t in enumerate(given) if storage_key(t) == storage}
    if len(owners) > 1 or storage in seen:
        raise _NotCached
    layout = _layout(value)
    if same:
        return _Argument(same[0])
    if owners:
        (of,) = owners.values()
        return _View(of, layout)
    like = new_fake(value)
    if layout.offset or like.untyped_storage().nbytes() != value.untyped_storage().nbytes():
        raise _NotCached
    seen.add(storage)
    return _New(like)


def _rebuilt(built: Any, given: list[FakeTensor]) -> Any:
    """The result of a call from its description."""
    kind = type(built)
    if kind is _New:
        return new_fake(built.like)
    if kind is _View:
        layout = built.layout
        return fake_view(given[built.of], layout.dtype, layout.shape, layout.stride, layout.offset)
    if kind is _Argument:
        return given[built.of]
    if isinstance(built, (tuple, list)):
        return kind([_rebuilt(one, given) for one in built])
    return built
