"""Replaces random draws by a constant, so that a step gives the same however it is split.

A plan that splits a step draws other numbers than one device: each part of the batch and each rank
has a random stream of its own. Everything else can be compared when no number depends on its
position: dropout then keeps every value and scales it, `rand` and `randn` give the same number
everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.ir.calls import is_random
from graphaccel.proof.modes import DRAWS, Given, Noise, bound
from graphaccel.sharding.apply.random_parts import DROPOUT_PART

aten = torch.ops.aten

_VALUE = 0.25
"""Low, so that dropout keeps values up to p = 0.75; nonzero, so that noise has a gradient."""


class ConstantDraws(TorchDispatchMode):
    """Every draw is a constant. `can_be_constant` says which draws are supported."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op: draws are replaced."""
        kwargs = kwargs or {}
        built = _CONSTANT.get(func.overloadpacket)
        if built is None:
            return func(*args, **kwargs)
        result = built(_constant, func, bound(func, args, kwargs))
        return func(*args, **kwargs) if result is NotImplemented else result


def can_be_constant(graph: fx.Graph) -> bool:
    """Whether `ConstantDraws` replaces every draw: a kernel may have a generator inside."""
    return all(
        getattr(node.target, "overloadpacket", None) in _CONSTANT
        for node in graph.nodes
        if node.op == "call_function" and is_random(node)
    )


def _constant(shape: Any, device: torch.device, normal: bool = False) -> Tensor:
    return torch.full(tuple(shape), _VALUE, dtype=torch.float32, device=device)


def _dropout_part(noise: Noise, func: Any, given: Given) -> Any:
    x, p = given["x"], given["p"]
    mask = noise(x.shape, x.device) < 1 - p
    return x * mask / (1 - p) if p < 1 else torch.zeros_like(x), mask


_CONSTANT = {**DRAWS, DROPOUT_PART.overloadpacket: _dropout_part}
