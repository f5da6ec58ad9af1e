"""Fake tensors: shapes, dtypes and devices without data, which tracing and rewriting compute with.

Importing it corrects what fake tensors of torch before 2.13 report of attention on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx

# What fake tensors report of single ops.
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl

# Tensors with shapes and no data: tracing and propagation.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphaccel.compat.torch.modes import without_modes

__all__ = ["FakeTensor", "FakeTensorMode"]

# What a fake tensor raises where its values are asked for (runtime/deferred.py).
UnknownValue = (DataDependentOutputException, DynamicOutputShapeException)

# Calls in it compute real tensors though a fake-tensor mode is on (constants of a capture).
without_fakes = unset_fake_temporarily


@cache
def attributes_of_fakes() -> frozenset[str]:
    """The names of what torch itself keeps on a fake tensor that is a parameter."""
    parameter = torch.nn.Parameter(FakeTensorMode().from_tensor(torch.empty(0)))
    return frozenset({*vars(parameter), *FakeTensor.__annotations__})


def _correct_attention_dtype() -> None:
    """Attention on a CPU returns the log-sum-exp of float64 in float64. Fake tensors of torch 2.11
    and 2.12 report float32; since 2.13 they report what the kernel returns."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    since = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if since >= (2, 13) or attention in op_implementations_dict:
        return

    def fake(mode: FakeTensorMode, op: Any, query: torch.Tensor, *_: Any, **__: Any) -> Any:
        if query.dtype != torch.float64:
            return NotImplemented  # then torch's own
        batch, heads, length, _width = query.shape
        return torch.empty_like(query), query.new_empty((batch, length, heads)).transpose(1, 2)

    register_op_impl(attention)(fake)
    FakeTensorMode.cache_clear()  # of what was computed before


_correct_attention_dtype()


def uncached_fake_mode() -> FakeTensorMode:
    """A mode that caches no result, for callers with a cache of their own: the key of a call costs
    about as much as the call."""
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


def fake_like_meta(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of `mode` on a device, with the metadata of a tensor of the meta device."""
    return FakeTensor(mode, meta, device)


_PLAIN_VIEWS = frozenset(
    {
        torch.ops.aten.reshape.default, torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default, torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
    }
)  # fmt: skip
"""Views that fake tensors treat apart where sizes are symbols."""


def has_meta_kernel(target: Any) -> bool:
    """Whether a call's op computes its result's metadata itself, the same on every device: it is
    not composed of other ops, which depend on the device's kernel (as those of attention do)."""
    if target in _PLAIN_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target in op_implementations_dict:
        return False  # the latter have a rule of fake tensors
    return target.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta)


@contextmanager
def without_torch_dispatch() -> Iterator[None]:
    """Meanwhile no fake-tensor mode sees the calls: for tensors that are not fake."""
    guard = torch._C._DisableTorchDispatch()
    try:
        yield
    finally:
        del guard


def clear_fake_memo(mode: FakeTensorMode) -> None:
    """Drop a mode's weak references to its tensors: `module.to(dtype)` can not swap one that has
    any."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def fake_mode_of(nodes: list[fx.Node]) -> Any:
    """The fake-tensor mode that the values of `nodes` belong to."""
    for node in nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode()


def fake_factory(tensor: FakeTensor) -> Callable[[], FakeTensor]:
    """A function that returns new fake tensors with a tensor's dtype, shape, strides and device; it
    calls no op."""
    mode, device = tensor.fake_mode, tensor.fake_device
    with without_modes():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return lambda: FakeTensor(mode, like, device)


def new_fake(tensor: FakeTensor) -> FakeTensor:
    """A fake tensor with a tensor's dtype, shape, strides and device, and storage of its own; calls
    no op of the fake mode."""
    with without_torch_dispatch():
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(tensor.fake_mode, like, tensor.fake_device)


def fake_view(
    of: FakeTensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> FakeTensor:
    """A fake tensor of this layout in the storage of another, on its device; calls no op of the
    fake mode. offset: in elements of dtype."""
    with without_torch_dispatch():
        like = torch.empty((0,), dtype=dtype, device="meta")
        like.set_(of.untyped_storage(), offset, shape, stride)  # type: ignore[call-overload]
    return FakeTensor(of.fake_mode, like, of.fake_device)


def results_of(mode: FakeTensorMode) -> dict[Hashable, Any]:
    """A cache of what calls return in a fake mode (`ir.fake_calls`), which lives as long as it."""
    return vars(mode).setdefault("graphaccel_results", {})


def fakes_like(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors with the layout of the given ones, in a new mode."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = []
        for t in tensors:
            offset = int(t.storage_offset())
            reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            flat = torch.empty(offset + max(0, reach), dtype=t.dtype, device=t.device)
            fakes.append(flat.as_strided(t.shape, t.stride(), offset))
    return fakes
