"""What a report says of fused ops: which are placed, and whether their kernels run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphaccel.kernels.jit import has_triton
from graphaccel.kernels.registry import fusion_named


def fusion_notes(placed: Mapping[str, int], device: str) -> tuple[str, ...]:
    """placed: how often each is, by name. device: the type that the plan is for, "cpu" or "cuda".

    The second line is there where the kernels of some of them can not run: their references do.
    """
    said = ", ".join(f"{name} {count}" for name, count in placed.items())
    lines = (f"fused ops: {said}" if said else "fused ops: none fits; graphaccel explain says why",)
    if not any(fusion_named(name).cuda_forward for name in placed):
        return lines
    if device == "cpu":
        return (*lines, "they run as calls of torch: their kernels are for GPUs")
    if torch.cuda.is_available() and not has_triton():
        return (
            *lines,
            "they run as calls of torch: Triton, which makes their kernels, is missing",
        )
    return lines
