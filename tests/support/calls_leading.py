"""Random small calls of ops on images, matrices and rows (`graphaccel.rules.leading`)."""

from __future__ import annotations

import torch

from tests.support.calls import Arguments, Draw

aten = torch.ops.aten


def pooled_call(d: Draw) -> Arguments:
    x = d.real(d.size(), 2, 4, 4)
    out, where = aten.adaptive_max_pool2d(x, [2, 2])
    return (d.real(*out.shape), x, where), {}


def padded_call(d: Draw) -> Arguments:
    n = d.size()
    return (d.real(n, 2, 5, 7), d.real(n, 2, 4, 4), [1, 2, 1, 0]), {}


def cholesky_call(d: Draw) -> Arguments:
    x = d.real(*d.shape(0, 2), 3, 3)
    return (x @ x.mT + torch.eye(3, dtype=x.dtype),), {}


def halved_call(d: Draw) -> Arguments:
    return (d.real(2, 2, 4), d.real(2, 4, 4), 1), {}


def searched_call(d: Draw) -> Arguments:
    if d.one(True, False):
        return (d.real(4).sort()[0], d.real(*d.shape())), {}
    n = d.size()
    return (d.real(n, 4).sort()[0], d.real(n, 3)), {}


def own_statistics_call(d: Draw) -> Arguments:
    """As instance norm calls it: no running statistics."""
    x = d.real(*d.one([4, 2], [2, 4, 3, 3]))
    c = x.shape[1]
    return (x, d.real(c), d.real(c), None, None, True, 0.1, 1e-5), {}
