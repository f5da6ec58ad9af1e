"""Sharding rules of linear algebra: only the batch dims before the matrices can be sharded."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.sharding.rules.notation import (
    Indices,
    Notation,
    Rule,
    Rules,
    index_names,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten


def matrices(
    inputs: tuple[int, ...] = (2,),
    outputs: tuple[int, ...] = (2,),
    *,
    linear: tuple[tuple[int, ...], ...] = (),
    kept: tuple[int, ...] = (),
    columns: int | None = None,
) -> Rule:
    """inputs, outputs: how many dims of each tensor are one matrix (2), vector (1) or number (0).

    The dims before are broadcast. kept: results that do not depend on the `linear` inputs; results
    that were not requested are empty. columns: an input whose columns are independent, as then are
    those of the first result.
    """

    def rule(node: fx.Node) -> Notation:
        shapes = [shape_of(t) for t in tensor_arguments(node)]
        lead = torch.broadcast_shapes(
            *(s[: len(s) - n] for s, n in zip(shapes, inputs, strict=True))
        )
        results = output_shapes(node)
        unasked = {k for k, s in enumerate(results) if 0 in s}
        given = [_batched(s, n, lead) for s, n in zip(shapes, inputs, strict=True)]
        built = [_batched(s, n, lead) for s, n in zip(results, outputs, strict=True)]
        if columns is not None:
            given[columns] = (*given[columns][:-1], "k")
            built[0] = (*built[0][:-1], "k")
        return Notation(
            tuple(given),
            tuple(built),
            linear=tuple(frozenset(g) for g in linear),
            sums=False,
            kept=frozenset(kept) | unasked,
        )

    return rule


def _batched(shape: tuple[int, ...], inside: int, lead: tuple[int, ...]) -> Indices:
    if len(shape) < inside or 0 in shape:  # a result that was not requested
        return ("",) * len(shape)
    names = index_names(len(lead))
    own = shape[: len(shape) - inside]
    start = len(lead) - len(own)
    before = tuple(
        "1" if n == 1 and lead[start + k] != 1 else names[start + k] for k, n in enumerate(own)
    )
    return (*before, *("",) * inside)


def _pseudo_inverse(node: fx.Node) -> Notation:
    """linalg_pinv: each matrix has numbers for the tolerances that are given."""
    return matrices((2, *(0,) * (len(tensor_arguments(node)) - 1)))(node)


def _solution(node: fx.Node) -> Notation:
    """_linalg_solve_ex: right-hand sides are matrices, or vectors if they have one dim less."""
    left, right = (shape_of(t) for t in tensor_arguments(node))
    vector = len(right) == 1 or (len(left) - 1 == len(right) and right == left[:-1])
    width, columns = (1, None) if vector else (2, 1 if arguments(node)["left"] else None)
    sizes = (width, 2, 1, 0)
    return matrices((2, width), sizes, linear=((1,),), kept=(1, 2, 3), columns=columns)(node)


def _triangular(node: fx.Node) -> Notation:
    """linalg_solve_triangular: right-hand sides are columns, or rows if the matrix is on the
    right."""
    columns = 1 if arguments(node)["left"] else None
    return matrices((2, 2), (2,), linear=((1,),), columns=columns)(node)


def _factored(node: fx.Node) -> Notation:
    """linalg_lu_solve: a matrix as its factors."""
    columns = 2 if arguments(node)["left"] else None
    return matrices((2, 1, 2), (2,), linear=((2,),), columns=columns)(node)


def _distances(node: fx.Node) -> Notation:
    """_cdist_forward: distances of every row of one tensor to every row of the other."""
    left, right = (shape_of(t) for t in tensor_arguments(node))
    lead = _lead(left, right)
    return Notation(((*lead, "p", "m"), (*lead, "r", "m")), ((*lead, "p", "r"),), sums=False)


def _distances_backward(node: fx.Node) -> Notation:
    """The gradient of the first rows: a sum over the second ones."""
    _, left, right, _ = (shape_of(t) for t in tensor_arguments(node))
    lead = _lead(left, right)
    between = (*lead, "p", "r")
    return Notation(
        (between, (*lead, "p", "m"), (*lead, "r", "m"), between),
        ((*lead, "p", "m"),),
        frozenset("m"),
        (frozenset({0}),),
    )


def _lead(left: tuple[int, ...], right: tuple[int, ...]) -> Indices:
    """Names of equal leading dims; broadcast dims cannot be sharded."""
    if left[:-2] == right[:-2]:
        return index_names(len(left) - 2)
    raise NotImplementedError("rows of broadcast batches")


def _cross(node: fx.Node) -> Notation:
    """linalg_cross: its dim, of size three, cannot be sharded."""
    tensors = [shape_of(t) for t in tensor_arguments(node)]
    (out,) = output_shapes(node)
    names = index_names(len(out))
    whole = frozenset({names[arguments(node)["dim"] % len(out)]})
    inputs = tuple(_batched(s, 0, out) for s in tensors)
    return Notation(inputs, (names,), whole, (frozenset({0}), frozenset({1})), sums=False)


def _trilinear(node: fx.Node) -> Notation:
    """_trilinear (of nn.Bilinear): a product of three tensors, each expanded along some dims,
    summed over others."""
    given = arguments(node)
    shapes = [shape_of(t) for t in tensor_arguments(node)]
    rank = len(shapes[0]) + len(given["expand1"])
    names = index_names(rank)
    inputs = []
    for position, shape in enumerate(shapes, 1):
        expanded = {d % rank for d in given[f"expand{position}"]}
        inputs.append(tuple(names[d] for d in range(rank) if d not in expanded))
        if len(inputs[-1]) != len(shape):
            raise NotImplementedError("dims that are expanded twice")
    summed = {d % rank for d in given["sumdim"]}
    out = tuple(names[d] for d in range(rank) if d not in summed)
    sizes: dict[str, int] = {}
    for own, shape in zip(inputs, shapes, strict=True):
        for name, size in zip(own, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    seen = tuple(
        tuple("1" if n == 1 and sizes[i] > 1 else i for i, n in zip(own, shape, strict=True))
        for own, shape in zip(inputs, shapes, strict=True)
    )
    return Notation(seen, (out,), linear=tuple(frozenset({i}) for i in range(3)))


RULES: Rules = MappingProxyType(
    {
        aten._linalg_det.default: matrices((2,), (0, 2, 1)),
        aten._linalg_slogdet.default: matrices((2,), (0, 0, 2, 1)),
        aten.linalg_inv_ex.default: matrices((2,), (2, 0)),
        aten.linalg_cholesky_ex.default: matrices((2,), (2, 0)),
        aten.cholesky_inverse.default: matrices(),
        aten.cholesky_solve.default: matrices((2, 2), (2,), linear=((0,),), columns=0),
        aten._linalg_solve_ex.default: _solution,
        aten.linalg_solve_triangular.default: _triangular,
        aten.linalg_lu_factor_ex.default: matrices((2,), (2, 1, 0)),
        aten.linalg_lu_solve.default: _factored,
        aten.lu_unpack.default: matrices((2, 1), (2, 2, 2)),
        aten.linalg_lu.default: matrices((2,), (2, 2, 2)),
        aten.linalg_qr.default: matrices((2,), (2, 2)),
        aten.geqrf.default: matrices((2,), (2, 1)),
        aten.linalg_householder_product.default: matrices((2, 1)),
        aten.ormqr.default: matrices((2, 1, 2), (2,), linear=((2,),)),
        aten._linalg_svd.default: matrices((2,), (2, 1, 2)),
        aten._linalg_eigh.default: matrices((2,), (1, 2)),
        aten.linalg_eig.default: matrices((2,), (1, 2)),
        aten.linalg_matrix_exp.default: matrices(),
        aten.linalg_pinv.atol_rtol_tensor: _pseudo_inverse,
        aten._cdist_forward.default: _distances,
        aten._cdist_backward.default: _distances_backward,
        aten.linalg_cross.default: _cross,
        aten._trilinear.default: _trilinear,
    }
)
