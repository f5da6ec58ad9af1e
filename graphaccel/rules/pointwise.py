"""Elementwise ops through which partial sums pass, and the few that need a rule of their own."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.rules.notation import (
    Notation,
    Rule,
    Rules,
    broadcast,
    named_dims,
    output_shapes,
    same_dims,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten


def _linear_in(*groups: tuple[int, ...]) -> Rule:
    return lambda node: broadcast(node, linear=groups)


def _times(node: fx.Node) -> Notation:
    """mul: linear in each factor alone."""
    return broadcast(node, linear=[(i,) for i in range(len(tensor_arguments(node)))])


def _plus(node: fx.Node) -> Notation:
    """add, sub: linear in both together; adding a number is not linear."""
    count = len(tensor_arguments(node))
    return broadcast(node, linear=[(0, 1)] if count == 2 else [])


def _cast(node: fx.Node) -> Notation:
    """_to_copy: linear, unless it cuts fractions off or makes truth values of numbers."""
    (source,) = tensor_arguments(node)
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    cuts = old.is_floating_point and not new.is_floating_point
    return broadcast(node, linear=[] if cuts or (new is torch.bool and old is not new) else [(0,)])


def _dropout(node: fx.Node) -> Notation:
    names = named_dims(node)
    return Notation((names,), (names, names))


def _where(node: fx.Node) -> Notation:
    """where(condition, a, b): linear in the two branches together."""
    count = len(tensor_arguments(node))
    return broadcast(node, linear=[(1, 2)] if count == 3 else [])


def _log_sigmoid(node: fx.Node) -> Notation:
    """Its second result is as large as the first, or empty, as the device has it."""
    names = named_dims(node)
    full, kept = output_shapes(node)
    return Notation((names,), (names, names if kept == full else ("",) * len(kept)))


def _log_sigmoid_backward(node: fx.Node) -> Notation:
    names = named_dims(node)
    kept = shape_of(tensor_arguments(node)[2])
    last = names if kept == output_shapes(node)[0] else ("",) * len(kept)
    return Notation((names, names, last), (names,), linear=(frozenset({0}),))


_FIRST = _linear_in((0,))

RULES: Rules = MappingProxyType(
    {
        aten.add.Tensor: _plus,
        aten.sub.Tensor: _plus,
        aten.mul.Tensor: _times,
        aten.mul.Scalar: _FIRST,
        aten.div.Tensor: _FIRST,
        aten.div.Scalar: _FIRST,
        aten.neg.default: _FIRST,
        aten._to_copy.default: _cast,
        aten.clone.default: same_dims,
        aten.detach.default: same_dims,
        aten.where.self: _where,
        aten.masked_fill.Scalar: broadcast,
        aten.tanh_backward.default: _FIRST,
        aten.gelu_backward.default: _FIRST,
        aten.silu_backward.default: _FIRST,
        aten.sigmoid_backward.default: _FIRST,
        aten.threshold_backward.default: _FIRST,
        aten.native_dropout_backward.default: _FIRST,
        aten.native_dropout.default: _dropout,
        aten.copy.default: _linear_in((1,)),
        aten.fill.Tensor: broadcast,
        aten.fill.Scalar: broadcast,
        aten.log_sigmoid_forward.default: _log_sigmoid,
        aten.log_sigmoid_backward.default: _log_sigmoid_backward,
        aten._prelu_kernel.default: broadcast,
        aten._prelu_kernel_backward.default: _FIRST,
    }
)
