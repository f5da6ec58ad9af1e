"""Sharding rules of ops that act on their last dims (image, matrix, row); batch dims are free."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.sharding.rules.notation import (
    Notation,
    Rules,
    index_names,
    name_at,
    named_dims,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _one_of_a_dim(node: fx.Node) -> Notation:
    """median, kthvalue: the reduced dim cannot be sharded; it disappears or has size one."""
    names = named_dims(node)
    if not names:
        return Notation(((),), ((), ()))
    given = arguments(node)
    dim = given["dim"] % len(names)
    kept = ("1",) if given["keepdim"] else ()
    out = (*names[:dim], *kept, *names[dim + 1 :])
    return Notation((names,), (out, out), frozenset({names[dim]}), sums=False)


def _glu(node: fx.Node) -> Notation:
    """glu and its backward: the halved dim cannot be sharded."""
    names = index_names(len(shape_of(tensor_arguments(node)[-1])))
    dim = arguments(node)["dim"] % len(names)
    inputs = tuple(names for _ in tensor_arguments(node))
    groups = _FIRST if len(inputs) == 2 else ()
    return Notation(inputs, (names,), frozenset({names[dim]}), groups)


def _against_edges(node: fx.Node) -> Notation:
    """bucketize, searchsorted along one row of edges: elementwise in the values."""
    edges_first = node.target is aten.searchsorted.Tensor
    tensors = tensor_arguments(node)
    values = index_names(len(output_shapes(node)[0]))
    edges = ("",) * len(shape_of(tensors[0 if edges_first else 1]))
    if len(edges) > 1:  # a row of edges for each row of values
        values = edges = (*index_names(len(edges) - 1), "")
    inputs = (edges, values) if edges_first else (values, edges)
    return Notation(inputs, (values,), sums=False)


def _diagonal(node: fx.Node) -> Notation:
    """The two dims cannot be sharded; the diagonal is the last dim."""
    names = named_dims(node)
    given = arguments(node)
    pair = {given["dim1"] % len(names), given["dim2"] % len(names)}
    rest = tuple(n for i, n in enumerate(names) if i not in pair)
    whole = frozenset(names[i] for i in pair)
    return Notation((names,), ((*rest, ""),), whole, _FIRST)


def _diagonal_backward(node: fx.Node) -> Notation:
    names = index_names(len(output_shapes(node)[0]))
    given = arguments(node)
    pair = {given["dim1"] % len(names), given["dim2"] % len(names)}
    rest = tuple(n for i, n in enumerate(names) if i not in pair)
    whole = frozenset(names[i] for i in pair)
    return Notation(((*rest, ""),), (names,), whole, _FIRST)


def _unfold_backward(node: fx.Node) -> Notation:
    names = index_names(len(output_shapes(node)[0]))
    whole = name_at(names, arguments(node)["dim"])
    return Notation(((*names, ""),), (names,), frozenset({whole}), _FIRST)


def _diagonal_scatter(node: fx.Node) -> Notation:
    """The two dims cannot be sharded; linear in both tensors together."""
    names = named_dims(node)
    given = arguments(node)
    pair = {given["dim1"] % len(names), given["dim2"] % len(names)}
    rest = tuple(n for i, n in enumerate(names) if i not in pair)
    whole = frozenset(names[i] for i in pair)
    return Notation((names, (*rest, "")), (names,), whole, (frozenset({0, 1}),))


def _renorm(node: fx.Node) -> Notation:
    """renorm: slices along its dim are independent, no other dim can be sharded."""
    names = named_dims(node)
    kept = name_at(names, arguments(node)["dim"])
    return Notation((names,), (names,), frozenset(names) - {kept}, sums=False)


def _trace(node: fx.Node) -> Notation:
    return Notation((("", ""),), ((),), linear=_FIRST)


def _blocks(node: fx.Node) -> Notation:
    """block_diag: linear in all of its blocks together."""
    tensors = tensor_arguments(node)
    inputs = tuple(("",) * len(shape_of(t)) for t in tensors)
    return Notation(inputs, (("", ""),), linear=(frozenset(range(len(tensors))),))


def _diag_embed(node: fx.Node) -> Notation:
    """The last dim becomes two."""
    names = named_dims(node)
    given, rank = arguments(node), len(names) + 1
    pair = {given["dim1"] % rank, given["dim2"] % rank}
    rest = iter(names[:-1])
    out = tuple("" if i in pair else next(rest) for i in range(rank))
    return Notation(((*names[:-1], ""),), (out,), linear=_FIRST)


def _turned(node: fx.Node) -> Notation:
    """rot90: the two rotated dims cannot be sharded."""
    names = named_dims(node)
    pair = {d % len(names) for d in arguments(node)["dims"]}
    seen = tuple("" if i in pair else n for i, n in enumerate(names))
    return Notation((seen,), (seen,), linear=_FIRST)


def _multinomial(node: fx.Node) -> Notation:
    """Draws from rows of probabilities: neither the row nor its draws can be sharded."""
    rows = named_dims(node)[:-1]
    return Notation(((*rows, "p"),), ((*rows, "k"),), frozenset({"p", "k"}), sums=False)


RULES: Rules = MappingProxyType(
    {
        aten.multinomial.default: _multinomial,
        aten.median.dim: _one_of_a_dim,
        aten.kthvalue.default: _one_of_a_dim,
        aten.nanmedian.dim: _one_of_a_dim,
        aten.mode.default: _one_of_a_dim,
        aten.glu.default: _glu,
        aten.glu_backward.default: _glu,
        aten.bucketize.Tensor: _against_edges,
        aten.searchsorted.Tensor: _against_edges,
        aten.diagonal.default: _diagonal,
        aten.diagonal_backward.default: _diagonal_backward,
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten.renorm.default: _renorm,
        aten.trace.default: _trace,
        aten.block_diag.default: _blocks,
        aten.diag_embed.default: _diag_embed,
        aten.rot90.default: _turned,
        aten.unfold_backward.default: _unfold_backward,
    }
)
