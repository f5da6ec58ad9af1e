"""Sharding rules of factory ops (zeros, full, arange): each rank creates its own shard."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.sharding.rules.notation import (
    Notation,
    Rules,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten


def _factory(node: fx.Node) -> Notation:
    outputs = tuple(("",) * len(s) for s in output_shapes(node))
    inputs = tuple(("",) * len(shape_of(t)) for t in tensor_arguments(node))
    return Notation(inputs, outputs, unread=frozenset(range(len(inputs))))


# Elements do not depend on their position: a shard is a smaller tensor.
UNIFORM = frozenset(
    {
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.empty.memory_format,
        aten.scalar_tensor.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.rand.default,
        aten.randn.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.randint.default,
        aten.randint.low,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.bernoulli.p,
        aten.exponential.default,
        aten.uniform.default,
        aten.normal_functional.default,
        aten.normal.float_float,
        aten._efficientzerotensor.default,
    }
)
COUNTS = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})

# Elements depend on their position: a smaller tensor is not a shard.
ORDERED = frozenset(
    {
        aten.linspace.default,
        aten.logspace.default,
        aten.eye.default,
        aten.eye.m,
        aten.tril_indices.default,
        aten.triu_indices.default,
        aten.randperm.default,
    }
)

RULES: Rules = MappingProxyType(dict.fromkeys(UNIFORM | COUNTS | ORDERED, _factory))
