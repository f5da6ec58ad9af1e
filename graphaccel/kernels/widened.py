"""Derives from a fused op a variant that computes in float32 for 16-bit inputs (autocast).

    y = op(float32(inputs))      gradients = op_backward(float32(saved)), rounded once

This is what autocast makes of a pattern whose first step it widens. Inputs are saved for the
backward in their own dtype; casts in the graph would be saved in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphaccel.kernels.spec import Function, Fusion

_LOW = (torch.bfloat16, torch.float16)


def widened(fusion: Fusion) -> Fusion | None:
    """The fusion as an op of 16-bit inputs that computes in float32, and returns float32.

    None where it cannot be derived: rewrites and inline backwards are not ops; autocast leaves
    matmuls in 16 bits; random numbers may depend on the dtype; and the dtype of a gradient must be
    that of an input which the backward reads.
    """
    if fusion.rewrite is not None or fusion.inline or fusion.random or fusion.flops is not None:
        return None
    if not fusion.differentiable or not set(fusion.returned) <= set(fusion.read_back):
        return None
    return replace(
        fusion,
        wide=True,
        forward=_forward(fusion.forward),
        cuda_forward=_forward(fusion.cuda_forward),
        fake=_forward(fusion.fake),
        backward=_backward(fusion, fusion.backward),
        cuda_backward=_backward(fusion, fusion.cuda_backward),
        fake_backward=_backward(fusion, fusion.fake_backward),
        workspace=_workspace(fusion),
    )


def _low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _LOW


def _raised(value: Any) -> Any:
    return value.float() if _low(value) else value


def _like(run: Function, call: Function) -> Function:
    """`call` with the parameters of `run`: their names determine what is saved."""
    call.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]
    return call


def _forward(run: Function | None) -> Function | None:
    if run is None:
        return None
    known = run

    def call(*args: Any, **kwargs: Any) -> Any:
        return known(*map(_raised, args), **{n: _raised(v) for n, v in kwargs.items()})

    return _like(run, call)


def _backward(fusion: Fusion, run: Function | None) -> Function | None:
    if run is None:
        return None
    known, names = run, tuple(inspect.signature(run).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        result = known(**{n: _raised(v) for n, v in given.items()})
        several: Sequence[Any] = result if len(fusion.returned) > 1 else (result,)
        rounded: tuple[Any, ...] = tuple(
            None if grad is None else grad.to(given[name].dtype)
            for name, grad in zip(fusion.returned, several, strict=True)
        )
        return rounded[0] if len(rounded) == 1 else rounded

    return _like(run, call)


def _workspace(fusion: Fusion) -> Function:
    def copies(**inputs: Any) -> int:
        own = 0 if fusion.workspace is None else int(fusion.workspace(**inputs))
        return own + sum(4 * v.numel() for v in inputs.values() if _low(v))

    return copies
