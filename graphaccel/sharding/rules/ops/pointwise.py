"""Sharding rules of elementwise ops: which ops these are, and which of them are linear.

An op is elementwise if torch tags it so, if it is one of those that torch leaves untagged
(`_UNTAGGED`), or if it is the backward of an elementwise op (`elu_backward`), which is linear in
the incoming gradient.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.sharding.rules.notation import (
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
    """add, sub: linear in both operands together; not linear if one of them is a number."""
    count = len(tensor_arguments(node))
    return broadcast(node, linear=[(0, 1)] if count == 2 else [])


def _cast(node: fx.Node) -> Notation:
    """_to_copy: linear, unless it truncates fractions or converts numbers to bool."""
    (source,) = tensor_arguments(node)
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    cuts = old.is_floating_point and not new.is_floating_point
    return broadcast(node, linear=[] if cuts or (new is torch.bool and old is not new) else [(0,)])


def _dropout(node: fx.Node) -> Notation:
    names = named_dims(node)
    return Notation((names,), (names, names))


def _where(node: fx.Node) -> Notation:
    """where(condition, a, b): linear in the two branches together."""
    return broadcast(node, linear=[(1, 2)])


def _where_else(node: fx.Node) -> Notation:
    """where with one branch a number: linear in the other one if the number is zero."""
    given = arguments(node)
    number = given["self" if node.target is aten.where.ScalarSelf else "other"]
    return broadcast(node, linear=[(1,)] if number == 0 else [])


def _filled(node: fx.Node) -> Notation:
    """masked_fill: linear where zeros are filled in."""
    return broadcast(node, linear=[(0,)] if arguments(node)["value"] == 0 else [])


def is_pointwise(op: Any) -> bool:
    """Whether every element of an op's result depends only on the elements at the same position."""
    return torch.Tag.pointwise in getattr(op, "tags", ()) or op in _UNTAGGED or _is_derivative(op)


def _is_derivative(op: Any) -> bool:
    """Whether an op is the backward of an elementwise op, by its name."""
    packet = getattr(op, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if not name.endswith("_backward") or getattr(op, "namespace", "") != "aten":
        return False
    forward = getattr(getattr(aten, name.removesuffix("_backward"), None), "default", None)
    return torch.Tag.pointwise in getattr(forward, "tags", ()) or forward in _UNTAGGED


def pointwise_rule(node: fx.Node) -> Notation | None:
    """The rule of an elementwise op without an entry in `RULES`; None for any other op."""
    if not is_pointwise(node.target):
        return None
    return broadcast(node, linear=[(0,)] if _is_derivative(node.target) else [])


def _log_sigmoid(node: fx.Node) -> Notation:
    """The second result has the shape of the first or is empty, depending on the device."""
    names = named_dims(node)
    full, kept = output_shapes(node)
    return Notation((names,), (names, names if kept == full else ("",) * len(kept)))


def _log_sigmoid_backward(node: fx.Node) -> Notation:
    names = named_dims(node)
    kept = shape_of(tensor_arguments(node)[2])
    last = names if kept == output_shapes(node)[0] else ("",) * len(kept)
    return Notation((names, names, last), (names,), linear=(frozenset({0}),))


_FIRST = _linear_in((0,))

# torch 2.11 to 2.13 do not tag these.
_UNTAGGED = frozenset(
    {
        aten.bernoulli.default,
        aten.bernoulli.Tensor,
        aten.complex.default,
        aten.floor_divide.default,
        aten.floor_divide.Scalar,
        aten.frexp.Tensor,
        aten.hardswish.default,
        aten.masked_fill.Tensor,
        aten.normal.Tensor_float,
        aten.normal.float_Tensor,
        aten.normal.Tensor_Tensor,
        aten.polar.default,
        aten.rrelu_with_noise_functional.default,
        aten.rsub.Tensor,
        aten.rsub.Scalar,
        aten.zero.default,
    }
)

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
        aten.where.ScalarSelf: _where_else,
        aten.where.ScalarOther: _where_else,
        aten.masked_fill.Scalar: _filled,
        aten._conj.default: same_dims,
        aten.conj_physical.default: _FIRST,
        aten.lerp.Scalar: _linear_in((0, 1)),
        aten.lerp.Tensor: _linear_in((0, 1)),
        aten.complex.default: _linear_in((0, 1)),
        aten.rsub.Tensor: _plus,
        aten.rrelu_with_noise_backward.default: _FIRST,
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
