"""TensorFloat-32: float32 matmuls on CUDA with a 10-bit mantissa (PyTorch, "CUDA semantics")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def rounding(matmul: str) -> Iterator[None]:
    """Float32 matmuls on CUDA devices round their inputs to `matmul` in this context; the
    process's own setting is restored after it."""
    if matmul != "tfloat32":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    settings = (torch.backends.cuda.matmul, cudnn.conv)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
