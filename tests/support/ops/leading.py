"""Random small calls of ops on images, matrices and rows
(`graphaccel.sharding.rules.ops.batch_dims`)."""

from __future__ import annotations

import torch

from tests.support.ops.calls import Arguments, Draw

aten = torch.ops.aten


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
