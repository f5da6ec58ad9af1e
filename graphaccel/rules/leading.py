"""Ops that treat what their last dims hold (an image, a matrix, a row) by itself: the dims before
are independent."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.rules.notation import (
    Indices,
    Notation,
    Rule,
    Rules,
    arguments,
    index_names,
    named_dims,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _leading(inside: int, outputs: int | None = None, *, linear: bool = False) -> Rule:
    """inside: how many dims of each input hold one thing; outputs: of each result."""

    def rule(node: fx.Node) -> Notation:
        shapes = [shape_of(t) for t in tensor_arguments(node)]
        inputs = tuple(_names(len(s), inside) for s in shapes)
        after = inside if outputs is None else outputs
        results = tuple(_names(len(s), after) for s in output_shapes(node))
        return Notation(inputs, results, linear=_FIRST if linear else (), sums=False)

    return rule


def _names(rank: int, inside: int) -> Indices:
    before = max(0, rank - inside)
    return (*index_names(before), *("",) * (rank - before))


def _examples(node: fx.Node) -> Notation:
    """Only the first dim of all tensors is independent."""
    inputs = tuple(_first(len(shape_of(t))) for t in tensor_arguments(node))
    outputs = tuple(_first(len(s)) for s in output_shapes(node))
    return Notation(inputs, outputs, sums=False)


def _first(rank: int) -> Indices:
    return ("n", *("",) * (rank - 1))


def _determinant(node: fx.Node) -> Notation:
    (names,) = (_names(len(shape_of(t)), 2) for t in tensor_arguments(node))
    lead = names[:-2]
    return Notation((names,), (lead, names, (*lead, "")), sums=False)


def _inverse(node: fx.Node) -> Notation:
    (names,) = (_names(len(shape_of(t)), 2) for t in tensor_arguments(node))
    return Notation((names,), (names, names[:-2]), sums=False)


def _one_of_a_dim(node: fx.Node) -> Notation:
    """median, kthvalue: the dim stays whole, and is gone or of size one."""
    names = named_dims(node)
    given = arguments(node)
    dim = given["dim"] % len(names)
    kept = ("1",) if given["keepdim"] else ()
    out = (*names[:dim], *kept, *names[dim + 1 :])
    return Notation((names,), (out, out), frozenset({names[dim]}), sums=False)


def _glu(node: fx.Node) -> Notation:
    """glu and its backward: the dim that is halved stays whole."""
    names = index_names(len(shape_of(tensor_arguments(node)[-1])))
    dim = arguments(node)["dim"] % len(names)
    inputs = tuple(names for _ in tensor_arguments(node))
    groups = _FIRST if len(inputs) == 2 else ()
    return Notation(inputs, (names,), frozenset({names[dim]}), groups)


def _against_edges(node: fx.Node) -> Notation:
    """bucketize, searchsorted along one row of edges: each value by itself."""
    edges_first = node.target is aten.searchsorted.Tensor
    tensors = tensor_arguments(node)
    values = index_names(len(output_shapes(node)[0]))
    edges = ("",) * len(shape_of(tensors[0 if edges_first else 1]))
    if len(edges) > 1:  # a row of edges for each row of values
        values = edges = (*index_names(len(edges) - 1), "")
    inputs = (edges, values) if edges_first else (values, edges)
    return Notation(inputs, (values,), sums=False)


def _diagonal(node: fx.Node) -> Notation:
    """The two dims stay whole; the diagonal comes last."""
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
    dim = arguments(node)["dim"] % len(names)
    return Notation(((*names, ""),), (names,), frozenset({names[dim]}), _FIRST)


def _index_add(node: fx.Node) -> Notation:
    """The dim that is added along stays whole; linear in what is added to and what is."""
    names = named_dims(node)
    dim = arguments(node)["dim"] % len(names)
    return Notation((names, ("",), names), (names,), frozenset({names[dim]}), (frozenset({0, 2}),))


def _diag_embed(node: fx.Node) -> Notation:
    """The last dim becomes two."""
    names = named_dims(node)
    given, rank = arguments(node), len(names) + 1
    pair = {given["dim1"] % rank, given["dim2"] % rank}
    rest = iter(names[:-1])
    out = tuple("" if i in pair else next(rest) for i in range(rank))
    return Notation(((*names[:-1], ""),), (out,), linear=_FIRST)


def _turned(node: fx.Node) -> Notation:
    """rot90: the two dims stay whole."""
    names = named_dims(node)
    pair = {d % len(names) for d in arguments(node)["dims"]}
    seen = tuple("" if i in pair else n for i, n in enumerate(names))
    return Notation((seen,), (seen,), linear=_FIRST)


def _solution(node: fx.Node) -> Notation:
    """_linalg_solve_ex: matrices and as many right sides; anything else stays whole."""
    shapes = [shape_of(t) for t in tensor_arguments(node)]
    alike = len(shapes[0]) == len(shapes[1]) and shapes[0][:-2] == shapes[1][:-2]
    lead = index_names(len(shapes[0]) - 2) if alike else ()
    inputs = tuple((*lead, *("",) * (len(s) - len(lead))) for s in shapes)
    outputs = tuple((*lead, *("",) * (len(s) - len(lead))) for s in output_shapes(node))
    return Notation(inputs, outputs, sums=False)


def _grid(node: fx.Node) -> Notation:
    """grid_sampler_2d: images [n, c, y, x] read at places [n, v, u, 2]."""
    return Notation((("n", "c", "", ""), ("n", "", "", "")), (("n", "c", "", ""),), sums=False)


_ONE, _TWO, _THREE = _leading(1), _leading(2), _leading(3)

RULES: Rules = MappingProxyType(
    {
        aten.pixel_shuffle.default: _leading(3, linear=True),
        aten.pixel_unshuffle.default: _leading(3, linear=True),
        aten.channel_shuffle.default: _examples,
        aten.adaptive_max_pool2d.default: _examples,
        aten.adaptive_max_pool2d_backward.default: _examples,
        aten.avg_pool3d.default: _examples,
        aten.avg_pool3d_backward.default: _examples,
        aten.reflection_pad1d.default: _ONE,
        aten.reflection_pad1d_backward.default: _ONE,
        aten.reflection_pad2d.default: _TWO,
        aten.reflection_pad2d_backward.default: _TWO,
        aten.replication_pad2d.default: _TWO,
        aten.replication_pad2d_backward.default: _TWO,
        aten.upsample_bicubic2d.default: _examples,
        aten.upsample_bicubic2d_backward.default: _examples,
        aten.im2col.default: _examples,
        aten.col2im.default: _examples,
        aten.grid_sampler_2d.default: _grid,
        aten.grid_sampler_2d_backward.default: _examples,
        aten._linalg_det.default: _determinant,
        aten.linalg_inv_ex.default: _inverse,
        aten.linalg_cholesky_ex.default: _inverse,
        aten._linalg_solve_ex.default: _solution,
        aten.median.dim: _one_of_a_dim,
        aten.kthvalue.default: _one_of_a_dim,
        aten.glu.default: _glu,
        aten.glu_backward.default: _glu,
        aten.bucketize.Tensor: _against_edges,
        aten.searchsorted.Tensor: _against_edges,
        aten.diagonal.default: _diagonal,
        aten.diagonal_backward.default: _diagonal_backward,
        aten.diag_embed.default: _diag_embed,
        aten.rot90.default: _turned,
        aten.unfold_backward.default: _unfold_backward,
        aten.index_add.default: _index_add,
    }
)
