"""Copies between a device and its host, as ops: what they give is known to lie on the one or other.

On CUDA the host's copy lies in pinned memory and both copies go beside what the device computes.
Where the device is the host's own processor they are plain copies into memory of their own, so that
the same code runs there, and meters tell host from device by these ops.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("graphaccel::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    """A contiguous copy of x in host memory; it may not be read before the stream is waited for."""
    made = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return made.copy_(x, non_blocking=True)


@to_host.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("graphaccel::to_device", mutates_args=())
def to_device(x: Tensor) -> Tensor:
    """A copy on the device of what `to_host` gave."""
    made = torch.empty(x.shape, dtype=x.dtype, device="cuda" if x.is_pinned() else x.device)
    return made.copy_(x, non_blocking=True)


@to_device.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


TO_HOST = torch.ops.graphaccel.to_host.default
TO_DEVICE = torch.ops.graphaccel.to_device.default
