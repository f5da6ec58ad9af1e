"""Sharding rules of ops that only move elements (view, cat, slice); all of them are linear."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.ir.values import operands
from graphaccel.sharding.rules.notation import (
    Notation,
    Rule,
    Rules,
    index_names,
    name_at,
    named_dims,
    output_shapes,
    regrouped,
    same_dims,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _reshape(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    left, right = regrouped(shape_of(source), output_shapes(node)[0])
    return Notation((left,), (right,), linear=_FIRST)


def _squeeze(node: fx.Node) -> Notation:
    """Without dims none may be sharded, as a shard of size one would be squeezed too (canonical
    form names the dims)."""
    result = _reshape(node)
    return Notation(result.inputs, result.outputs, frozenset(result.inputs[0]), _FIRST)


def _permute(node: fx.Node) -> Notation:
    names = named_dims(node)
    if node.target is aten.permute.default:
        order = [d % len(names) for d in arguments(node)["dims"]]
    else:
        order = list(range(len(names)))
        if node.target is aten.t.default:
            order.reverse()
        else:
            given = arguments(node)
            a, b = given["dim0"] % len(names), given["dim1"] % len(names)
            order[a], order[b] = order[b], order[a]
    return Notation((names,), (tuple(names[d] for d in order),), linear=_FIRST)


def _expand(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    shape, (out,) = shape_of(source), output_shapes(node)
    names = index_names(len(out))
    skipped = len(out) - len(shape)
    grown = tuple(
        "1" if n == 1 and out[skipped + i] != 1 else names[skipped + i] for i, n in enumerate(shape)
    )
    return Notation((grown,), (names,), linear=_FIRST)


def _repeat(node: fx.Node) -> Notation:
    """A repeated dim cannot be sharded: its copies would change order."""
    (source,) = tensor_arguments(node)
    shape, (out,) = shape_of(source), output_shapes(node)
    names = index_names(len(out))
    own = names[len(out) - len(shape) :]
    whole = {
        n for n, size, grown in zip(own, shape, out[-len(shape) :], strict=True) if size != grown
    }
    return Notation((own,), (names,), frozenset(whole), _FIRST)


def _slice(node: fx.Node) -> Notation:
    """A slice of a full dim leaves that dim shardable."""
    (source,) = tensor_arguments(node)
    names = named_dims(node)
    taken = shape_of(source) == output_shapes(node)[0] and arguments(node)["step"] == 1
    whole = frozenset() if taken else frozenset({names[arguments(node)["dim"] % len(names)]})
    return Notation((names,), (names,), whole, _FIRST)


def _narrow(node: fx.Node) -> Notation:
    """The narrowed dim cannot be sharded."""
    names = named_dims(node)
    whole = frozenset({names[int(operands(node)[1]) % len(names)]})
    return Notation((names,), (names,), whole, _FIRST)


def _parts(*, drops: bool) -> Rule:
    """select, split, unbind: the dim they split cannot be sharded; `drops`: the result does not
    have it."""

    def rule(node: fx.Node) -> Notation:
        names = named_dims(node)
        whole = names[arguments(node)["dim"] % len(names)]
        kept = tuple(n for n in names if not (drops and n == whole))
        outputs = tuple(kept for _ in output_shapes(node))
        return Notation((names,), outputs, frozenset({whole}), _FIRST)

    return rule


def _scatter_slice(node: fx.Node) -> Notation:
    """slice_scatter, select_scatter: the dim written along is not sharded; linear in both
    tensors."""
    base, source = tensor_arguments(node)
    names = index_names(len(shape_of(base)))
    dim = arguments(node)["dim"] % len(names)
    inner = names if len(shape_of(source)) == len(names) else names[:dim] + names[dim + 1 :]
    return Notation((names, inner), (names,), frozenset({names[dim]}), (frozenset({0, 1}),))


def _slice_backward(*, dropped: bool) -> Rule:
    """slice_backward, select_backward: a gradient put back to where its value was taken from."""

    def rule(node: fx.Node) -> Notation:
        (out,) = output_shapes(node)
        names = index_names(len(out))
        dim = arguments(node)["dim"] % len(names)
        inner = names[:dim] + names[dim + 1 :] if dropped else names
        source = shape_of(tensor_arguments(node)[0])
        whole = frozenset() if source == out else frozenset({names[dim]})
        return Notation((inner,), (names,), whole, _FIRST)

    return rule


def _concatenate(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    names = named_dims(node)
    dim = arguments(node)["dim"] % len(names)
    group = (frozenset(range(len(tensors))),)
    return Notation(tuple(names for _ in tensors), (names,), frozenset({names[dim]}), group)


def _stack(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    names = named_dims(node)
    dim = arguments(node)["dim"] % (len(names) + 1)
    out = (*names[:dim], "", *names[dim:])
    group = (frozenset(range(len(tensors))),)
    return Notation(tuple(names for _ in tensors), (out,), linear=group)


def _pad(node: fx.Node) -> Notation:
    names = named_dims(node)
    given = arguments(node)
    touched = {names[-1 - i // 2] for i, n in enumerate(given["pad"]) if n != 0}
    return Notation((names,), (names,), frozenset(touched), _FIRST if given["value"] == 0 else ())


def _moving(node: fx.Node) -> Notation:
    """roll, flip: the dims along which elements move cannot be sharded."""
    names = named_dims(node)
    dims = arguments(node)["dims"] or range(len(names))
    return Notation((names,), (names,), frozenset(names[d % len(names)] for d in dims), _FIRST)


def _triangle(node: fx.Node) -> Notation:
    """tril, triu: rows and columns cannot be sharded."""
    names = named_dims(node)
    return Notation((names,), (names,), frozenset(names[-2:]), _FIRST)


def _unfold(node: fx.Node) -> Notation:
    """Windows along one dim, which become a new last dim."""
    names = named_dims(node)
    whole = name_at(names, arguments(node)["dimension"])
    return Notation((names,), ((*names, ""),), frozenset({whole}), _FIRST)


REGROUPS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
"""Ops that keep all elements in order and change how dims are merged."""

RULES: Rules = MappingProxyType(
    {
        **dict.fromkeys(REGROUPS, _reshape),
        aten.squeeze.default: _squeeze,
        aten.alias.default: same_dims,
        aten.t.default: _permute,
        aten.transpose.int: _permute,
        aten.permute.default: _permute,
        aten.expand.default: _expand,
        aten.repeat.default: _repeat,
        aten.slice.Tensor: _slice,
        aten.narrow.default: _narrow,
        aten.select.int: _parts(drops=True),
        aten.split.Tensor: _parts(drops=False),
        aten.split_with_sizes.default: _parts(drops=False),
        aten.unbind.int: _parts(drops=True),
        aten.cat.default: _concatenate,
        aten.stack.default: _stack,
        aten.slice_backward.default: _slice_backward(dropped=False),
        aten.select_backward.default: _slice_backward(dropped=True),
        aten.slice_scatter.default: _scatter_slice,
        aten.select_scatter.default: _scatter_slice,
        aten.constant_pad_nd.default: _pad,
        aten.roll.default: _moving,
        aten.flip.default: _moving,
        aten.tril.default: _triangle,
        aten.triu.default: _triangle,
        aten.unfold.default: _unfold,
    }
)
