"""Sharding rules of fused attention: batch can be sharded, heads unless queries share keys."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.sharding.rules.notation import (
    Indices,
    Notation,
    Rules,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_WHOLE = frozenset("q s d e".split())
_QUERY: Indices = ("b", "h", "q", "d")
_KEY: Indices = ("b", "h", "s", "d")
_VALUE: Indices = ("b", "h", "s", "e")
_OUTPUT: Indices = ("b", "h", "q", "e")
_LOGSUM: Indices = ("b", "h", "q")


def _mask(tensor: fx.Node) -> Indices:
    """Dims of a mask: it is broadcast against the scores."""
    shape = shape_of(tensor)
    full = ("b", "h", "q", "s")[4 - len(shape) :]
    return tuple("1" if n == 1 else name for n, name in zip(shape, full, strict=True))


def _whole(query: fx.Node, key: fx.Node) -> frozenset[str]:
    return _WHOLE if shape_of(query)[1] == shape_of(key)[1] else _WHOLE | {"h"}


def _attention(node: fx.Node) -> Notation:
    """Dims of the [b, h, s, d] tensors, the result, and the log of the softmax denominator."""
    query, key, _, *rest = tensor_arguments(node)
    masks = [_mask(t) for t in rest]
    outputs = (_OUTPUT, _LOGSUM)[: len(output_shapes(node))]
    inputs = (_QUERY, _KEY, _VALUE, *masks)
    return Notation(inputs, outputs, _whole(query, key), sums=False)


def _attention_backward(node: fx.Node) -> Notation:
    _, query, key, _, _, _, *rest = tensor_arguments(node)
    masks = [_mask(t) for t in rest]
    inputs = (_OUTPUT, _QUERY, _KEY, _VALUE, _OUTPUT, _LOGSUM, *masks)
    return Notation(inputs, (_QUERY, _KEY, _VALUE), _whole(query, key), (frozenset({0}),))


RULES: Rules = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    }
)
