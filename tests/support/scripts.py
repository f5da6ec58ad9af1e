"""Training scripts as functions: each gets what stands in for its `optimize` line, and yields what
it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import graphaccel

Wrap = Callable[..., Any]
Script = Callable[[Wrap], Iterator[Tensor]]


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers in full, plain or optimized. Collective."""
    yield from graphaccel.full_state_dict(model).values()


def furthest(script: Script, pins: dict[str, Any]) -> float:
    """Largest difference of what the script yields between plain PyTorch and `optimize(**pins)`,
    relative to the plain value where that is larger than one."""

    def plain(model: nn.Module, *rest: Any) -> Any:
        return (model, *rest) if rest else model

    def ours(model: nn.Module, *rest: Any) -> Any:
        return graphaccel.optimize(model, *rest, **pins)

    results = []
    for wrap in (plain, ours):
        torch.manual_seed(0)
        results.append([value.detach().double().clone() for value in script(wrap)])
    pairs = list(zip(*results, strict=True))
    return max(float(((a - b).abs() / a.abs().clamp(min=1)).max()) for a, b in pairs)
