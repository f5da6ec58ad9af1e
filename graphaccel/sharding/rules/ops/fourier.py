"""Sharding rules of complex views and Fourier transforms; all of them are linear."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.sharding.rules.notation import (
    Notation,
    Rules,
    index_names,
    named_dims,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _as_pairs(node: fx.Node) -> Notation:
    """view_as_real: adds a dim of size two."""
    names = named_dims(node)
    return Notation((names,), ((*names, ""),), linear=_FIRST)


def _of_pairs(node: fx.Node) -> Notation:
    """view_as_complex: removes the last dim, of size two."""
    names = index_names(len(shape_of(tensor_arguments(node)[0])) - 1)
    return Notation(((*names, ""),), (names,), linear=_FIRST)


def _transform(node: fx.Node) -> Notation:
    """The transformed dims cannot be sharded."""
    names = named_dims(node)
    whole = {names[d % len(names)] for d in arguments(node)["dim"]}
    return Notation((names,), (names,), frozenset(whole), _FIRST, sums=False)


RULES: Rules = MappingProxyType(
    {
        aten.view_as_real.default: _as_pairs,
        aten.view_as_complex.default: _of_pairs,
        aten._fft_r2c.default: _transform,
        aten._fft_c2r.default: _transform,
        aten._fft_c2c.default: _transform,
    }
)
