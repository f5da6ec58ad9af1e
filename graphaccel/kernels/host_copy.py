"""Copies between a device and host memory, as ops whose results are known to be on one or the
other.

On CUDA the host's copy is in pinned memory and both copies overlap with the device's computation.
Where the device is the CPU they are plain copies into new memory, so that the same code runs there,
and meters distinguish host from device by these ops.

`to_device` is waited for immediately. `ahead` is not: computation may continue until `arrived`, and
the copy starts when the device reaches the point at which it was issued, however far ahead the host
is. So its memory comes from, and returns to, the compute stream, and no more of it is allocated
than the order of the calls implies (FSDP2 does this for its all-gathers, for the same reason).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def _side(device: int) -> torch.cuda.Stream:
    """The stream for copies between a device and the host, in order."""
    return torch.cuda.Stream(device)


def wait(device: torch.device) -> None:
    """Wait until copies to the host are complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.library.custom_op("graphaccel::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    """A contiguous copy of x in host memory; the host may not read it before `wait`."""
    built = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    if not x.is_cuda:
        return built.copy_(x)
    side = _side(x.device.index)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        built.copy_(x, non_blocking=True)
    x.record_stream(side)  # its memory is not reused before the copy is done
    return built


@to_host.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("graphaccel::to_device", mutates_args=())
def to_device(x: Tensor) -> Tensor:
    """A copy on the device of a result of `to_host`; later work on the device waits for it."""
    if not x.is_pinned():
        return x.clone()
    here = torch.cuda.current_stream()
    side = _side(torch.cuda.current_device())
    with torch.cuda.stream(side):  # after the copy to the host
        built = torch.empty(x.shape, dtype=x.dtype, device="cuda").copy_(x, non_blocking=True)
    here.wait_stream(side)
    built.record_stream(here)
    return built


@to_device.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("graphaccel::ahead", mutates_args=())
def ahead(x: Tensor) -> Tensor:
    """A copy on the device of a result of `on_host`, with the same strides; not valid before
    `arrived`. It waits for work that was issued to the device before."""
    if not x.is_pinned():
        return x.clone()
    built = torch.empty_like(x, device="cuda", pin_memory=False)
    side = _side(built.device.index)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        built.copy_(x, non_blocking=True)
    return built


@ahead.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_LIBRARY = torch.library.Library("graphaccel", "FRAGMENT")
_LIBRARY.define("arrived(Tensor(a) x) -> Tensor(a)")


def _arrived(x: Tensor) -> Tensor:
    """x itself, a result of `ahead`: later work on the device waits for it."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(_side(x.device.index))
    return x.view_as(x)


_LIBRARY.impl("arrived", _arrived, "CompositeExplicitAutograd")


def on_host(x: Tensor, device: torch.device) -> Tensor:
    """x in host memory from which `ahead` can copy to a device: x itself if it is there already, or
    if the device is the CPU."""
    if device.type != "cuda" or x.is_pinned():
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)


TO_HOST = torch.ops.graphaccel.to_host.default
TO_DEVICE = torch.ops.graphaccel.to_device.default
AHEAD, ARRIVED = torch.ops.graphaccel.ahead.default, torch.ops.graphaccel.arrived.default
