"""Sharding rules of reductions, and of ops along a dim that keep it (softmax, sort, cumsum)."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.sharding.rules.notation import (
    Notation,
    Rule,
    Rules,
    named_dims,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten


def _along(*, linear: bool = False) -> Rule:
    """Ops that act along their argument `dim`, which cannot be sharded."""

    def rule(node: fx.Node) -> Notation:
        tensors = tensor_arguments(node)
        names = named_dims(node)
        whole = frozenset({names[arguments(node)["dim"] % len(names)]} if names else ())
        groups = (frozenset({0}),) if linear else ()
        outputs = tuple(names for _ in output_shapes(node))
        return Notation(tuple(names for _ in tensors), outputs, whole, groups, sums=False)

    return rule


def _reduce(*, linear: bool) -> Rule:
    """Reductions: sharding a reduced dim makes a partial sum if the reduction is a sum."""

    def rule(node: fx.Node) -> Notation:
        names = named_dims(node)
        given = arguments(node)
        dims = given.get("dim")
        if dims is None or dims == []:
            dims = range(len(names))
        gone = (
            {d % len(names) for d in ([dims] if isinstance(dims, int) else dims)}
            if names
            else set()
        )
        keep = given.get("keepdim", False)
        out = tuple("1" if i in gone else n for i, n in enumerate(names) if keep or i not in gone)
        groups = (frozenset({0}),) if linear else ()
        outputs = tuple(out for _ in output_shapes(node))
        return Notation((names,), outputs, linear=groups, sums=linear)

    return rule


def _sum_of_numbers(node: fx.Node) -> Notation:
    """nansum: a sum, but not linear: a NaN in one term may be a number in another."""
    return replace(_reduce(linear=False)(node), sums=True)


def _all(node: fx.Node) -> Notation:
    """median of all elements, dist: no dim can be sharded."""
    inputs = tuple(("",) * len(shape_of(t)) for t in tensor_arguments(node))
    return Notation(inputs, tuple(() for _ in output_shapes(node)), sums=False)


def _mean(node: fx.Node) -> Notation:
    """A mean needs its reduced dims unsharded: canonical form has sums where a mean is over the
    batch."""
    result = _reduce(linear=True)(node)
    gone = set(result.inputs[0]) - set(result.outputs[0])
    return Notation(result.inputs, result.outputs, frozenset(gone), result.linear, sums=False)


_SUM = _reduce(linear=True)
_EXTREME = _reduce(linear=False)

RULES: Rules = MappingProxyType(
    {
        aten._softmax.default: _along(),
        aten._safe_softmax.default: _along(),
        aten._log_softmax.default: _along(),
        aten._softmax_backward_data.default: _along(linear=True),
        aten._log_softmax_backward_data.default: _along(linear=True),
        aten.cumsum.default: _along(linear=True),
        aten.logcumsumexp.default: _along(),
        aten.cumprod.default: _along(),
        aten.cummax.default: _along(),
        aten.cummin.default: _along(),
        aten.sort.default: _along(),
        aten.sort.stable: _along(),
        aten.topk.default: _along(),
        aten.sum.default: _SUM,
        aten.sum.dim_IntList: _SUM,
        aten.mean.dim: _mean,
        aten.mean.default: _mean,
        aten.argmax.default: _EXTREME,
        aten.argmin.default: _EXTREME,
        aten.amax.default: _EXTREME,
        aten.amin.default: _EXTREME,
        aten.max.default: _EXTREME,
        aten.min.default: _EXTREME,
        aten.max.dim: _EXTREME,
        aten.min.dim: _EXTREME,
        aten.any.default: _EXTREME,
        aten.any.dim: _EXTREME,
        aten.all.default: _EXTREME,
        aten.all.dim: _EXTREME,
        aten.aminmax.default: _EXTREME,
        aten.prod.default: _EXTREME,
        aten.nansum.default: _sum_of_numbers,
        aten.median.default: _all,
        aten.nanmedian.default: _all,
        aten.dist.default: _all,
        aten.std_mean.correction: _EXTREME,
        aten.prod.dim_int: _EXTREME,
        aten.logsumexp.default: _EXTREME,
        aten.var.correction: _EXTREME,
        aten.var_mean.correction: _EXTREME,
        aten.std.correction: _EXTREME,
        aten.linalg_vector_norm.default: _EXTREME,
        aten.norm.ScalarOpt_dim: _EXTREME,
    }
)
