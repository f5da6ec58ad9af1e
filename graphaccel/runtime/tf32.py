"""TensorFloat-32: float32 products of CUDA devices with 10 bits of mantissa (PyTorch, "CUDA
semantics")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def rounding(products: str) -> Iterator[None]:
    """Float32 products on CUDA devices round their inputs to `products`; the setting is the
    process's own again behind it."""
    if products != "tfloat32":
        yield
        return
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
