"""Tensors: their storage and version counter, and subclasses that hold no memory."""

from __future__ import annotations

from inspect import getattr_static
from typing import Any

import torch

# For tensor subclasses whose functions are those of plain tensors (runtime/parameters/sharded.py).
no_torch_function: Any = torch._C._disabled_torch_function_impl


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included."""
    return torch.Tensor.untyped_storage(tensor)._cdata  # a shard refuses its own


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors and handles share a tensor's memory: to know when a buffer can be reused."""
    return torch._C._storage_Use_Count(torch.Tensor.untyped_storage(tensor)._cdata)


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to in place, also through views of it."""
    return tensor._version


def without_storage(
    cls: type,
    shape: Any,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
    strides: Any = None,
) -> Any:
    """A tensor of a subclass that has shape, dtype and device but no memory
    (runtime/parameters/remote.py).

    strides: those of a contiguous tensor where None.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides, dtype=dtype, device=device, requires_grad=requires_grad
    )


def reregister_hooks(tensor: torch.Tensor) -> None:
    """Register a tensor's own hooks with autograd again: `torch.utils.swap_tensors` exchanges what
    autograd knows of two tensors, but not the hooks that they list."""
    if tensor._backward_hooks:
        tensor._backward_hooks = tensor._backward_hooks
    if tensor._post_accumulate_grad_hooks:
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """`Tensor.data`, of a subclass that has a property of that name."""
    return getattr_static(torch.Tensor, "data").__get__(tensor)
