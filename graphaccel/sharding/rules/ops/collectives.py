"""Sharding rules of collectives over another mesh axis: what they move is along dim 0."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphaccel.kernels.ops.expert_rows import EXCHANGE
from graphaccel.sharding.rules.notation import Notation, Rules, named_dims, same_dims

_ops = torch.ops._c10d_functional
_FIRST = (frozenset({0}),)


def _all_reduce(node: fx.Node) -> Notation:
    """Elementwise; a sum of partial sums is a partial sum, a maximum of them is not."""
    names = named_dims(node)
    return Notation((names,), (names,), linear=_FIRST if node.args[1] == "sum" else ())


def _first_whole(node: fx.Node) -> Notation:
    names = named_dims(node)
    return Notation((names,), (names,), frozenset(names[:1]), _FIRST)


def _exchanged(node: fx.Node) -> Notation:
    """Rows may be sharded along other dims; the counts of rows are replicated."""
    names = named_dims(node)
    return Notation((names, ("", "")), (names,), frozenset(names[:1]), _FIRST)


RULES: Rules = MappingProxyType(
    {
        _ops.wait_tensor.default: same_dims,
        _ops.all_reduce.default: _all_reduce,
        _ops.all_gather_into_tensor.default: _first_whole,
        _ops.reduce_scatter_tensor.default: _first_whole,
        _ops.all_to_all_single.default: _first_whole,
        EXCHANGE: _exchanged,
    }
)


def is_message(target: Any) -> bool:
    """Whether a call communicates with other ranks, or waits for that."""
    return target is EXCHANGE or "c10d" in str(target)
