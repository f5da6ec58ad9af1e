"""Imports Triton where it is installed; without it, references run instead of kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # not included in a CPU build of torch
    triton: Any = None
    tl: Any = None


def has_triton() -> bool:
    """Whether kernels can be compiled."""
    return triton is not None


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function itself where Triton is not installed."""
    return function if triton is None else triton.jit(function)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def warps(width: int) -> int:
    """Warps for a row of `width` elements: 16 elements per thread, so that the backward of a norm
    stays within 128 registers (the compile gate measures it)."""
    return min(max(width // 512, 4), 16)


@cache
def processors(device: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
