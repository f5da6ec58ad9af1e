"""Random small calls of linear algebra and of products that add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.ops.calls import Arguments, Case, Draw
from tests.support.recorded import Traced, through

aten = torch.ops.aten


def _square(function: Callable[[Tensor], Any]) -> Traced:
    """function of well-conditioned matrices, perhaps of a batch of them."""

    def draw(d: Draw) -> tuple[Any, ...]:
        return function, d.real(*d.shape(0, 2), 3, 3) + 3 * torch.eye(3, dtype=torch.float64)

    return draw


def _small(x: Tensor) -> Tensor:
    """A small number of each matrix."""
    return x[..., 0, 0].detach().sigmoid() / 100


def _definite(function: Callable[[Tensor], Any]) -> Traced:
    def draw(d: Draw) -> tuple[Any, ...]:
        x = d.real(*d.shape(0, 2), 3, 3)
        return function, x @ x.mT + torch.eye(3, dtype=x.dtype)

    return draw


def _system(function: Callable[[Tensor, Tensor], Any], *, same: bool = False) -> Traced:
    """function(matrix, right sides), the batches of which are equal or (not `same`) broadcast."""

    def draw(d: Draw) -> tuple[Any, ...]:
        lead = d.shape(0, 2)
        other = lead if same else d.one(lead, [d.one(n, 1) for n in lead], [])
        return (
            function,
            d.real(*lead, 3, 3) + 3 * torch.eye(3, dtype=torch.float64),
            d.real(*other, 3, 2),
        )

    return draw


def _added(left: str, right: str, added: str) -> Case:
    def case(d: Draw) -> Arguments:
        sizes = {i: d.size() for i in "bmkn"}
        tensors = [d.real(*[sizes[i] for i in names]) for names in (left, right)]
        base = d.real(*[d.one(sizes[i], sizes[i], 1) for i in added][d.one(0, 0, 1) :])
        return (base, *tensors), {}

    return case


def _distances(d: Draw) -> tuple[Any, ...]:
    lead = d.one([], [2])
    return (lambda x, y: torch.cdist(x, y, p=3.0), d.real(*lead, 4, 2), d.real(*lead, 2, 2))


CASES: Mapping[Any, Case] = MappingProxyType(
    {
        aten.vdot.default: lambda d: ((d.real(4), d.real(4)), {}),
        aten.addmv.default: _added("mk", "k", "m"),
        aten.addr.default: _added("m", "n", "mn"),
        aten.addbmm.default: _added("bmk", "bkn", "mn"),
        **through(
            {
                (aten._linalg_det.default,): _square(torch.linalg.det),
                (aten._linalg_slogdet.default,): _square(torch.linalg.slogdet),
                (aten.linalg_inv_ex.default,): _square(torch.linalg.inv),
                (aten.linalg_cholesky_ex.default,): _definite(torch.linalg.cholesky),
                (aten.cholesky_inverse.default,): _definite(torch.cholesky_inverse),
                (aten.cholesky_solve.default,): _system(
                    lambda a, b: torch.cholesky_solve(b, a.tril())
                ),
                (aten._linalg_solve_ex.default,): _system(torch.linalg.solve),
                (aten.linalg_solve_triangular.default,): _system(
                    lambda a, b: torch.linalg.solve_triangular(a, b, upper=True)
                ),
                (aten.linalg_lu_factor_ex.default, aten.lu_unpack.default): _square(
                    lambda a: torch.lu_unpack(*torch.linalg.lu_factor(a))
                ),
                (aten.linalg_lu_solve.default,): _system(
                    lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b)
                ),
                (aten.linalg_lu.default,): _square(torch.linalg.lu),
                (aten.linalg_qr.default,): _square(torch.linalg.qr),
                (aten.geqrf.default, aten.linalg_householder_product.default): _square(
                    lambda a: torch.linalg.householder_product(*torch.geqrf(a.detach())) + a
                ),
                (aten.ormqr.default,): _system(
                    lambda a, b: torch.ormqr(*torch.geqrf(a.detach()), b), same=True
                ),
                (aten._linalg_svd.default,): lambda d: (
                    d.one(torch.linalg.svd, torch.linalg.svdvals),
                    d.real(*d.shape(0, 2), 3, 2),
                ),
                (aten._linalg_eigh.default,): _definite(torch.linalg.eigh),
                (aten.linalg_eig.default,): _square(torch.linalg.eig),
                (aten.linalg_matrix_exp.default,): _square(torch.linalg.matrix_exp),
                (aten.linalg_pinv.atol_rtol_tensor,): lambda d: (
                    d.one(torch.linalg.pinv, lambda x: torch.linalg.pinv(x, rtol=_small(x))),
                    d.real(*d.shape(0, 2), 3, 2),
                ),
                (aten._cdist_forward.default, aten._cdist_backward.default): _distances,
                (aten.linalg_cross.default,): lambda d: (
                    lambda x, y: torch.linalg.cross(x, y, dim=1),
                    d.real(4, 3, 2),
                    d.real(d.one(4, 1), 3, 2),
                ),
                (aten._trilinear.default,): lambda d: (
                    F.bilinear,
                    d.real(*(s := d.shape(1, 2)), 2),
                    d.real(*s, 4),
                    d.real(4, 2, 4),
                ),
            }
        ),
    }
)
