"""Random small calls of elementwise, complex and Fourier ops."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from tests.support.ops.calls import Case, Draw, binary_call
from tests.support.recorded import through

aten = torch.ops.aten


def _complex(d: Draw, *shape: int) -> torch.Tensor:
    return torch.complex(d.real(*shape), d.real(*shape))


CASES: Mapping[Any, Case] = MappingProxyType(
    {
        aten.where.ScalarSelf: lambda d: (
            (d.truth(4, 2), d.one(0, 1.5), d.real(4, d.one(1, 2))),
            {},
        ),
        aten.where.ScalarOther: lambda d: (
            (d.truth(4, 2), d.real(4, d.one(1, 2)), d.one(0, 1.5)),
            {},
        ),
        aten.masked_fill.Scalar: lambda d: (
            (d.real(4, 2), d.truth(*d.one([4, 2], [1, 2])), d.one(0, 1.0)),
            {},
        ),
        aten.masked_fill.Tensor: lambda d: ((d.real(4, 2), d.truth(4, 2), d.real()), {}),
        aten.rsub.Tensor: binary_call(),
        aten.floor_divide.default: binary_call(),
        aten.frexp.Tensor: lambda d: ((d.real(*d.shape()),), {}),
        aten.lerp.Scalar: lambda d: ((d.real(4, 2), d.real(4, 2), 0.3), {}),
        aten.lerp.Tensor: lambda d: ((d.real(4, 2), d.real(4, 2), d.real(d.one(1, 2))), {}),
        aten.complex.default: lambda d: ((d.real(4, 2), d.real(d.one(1, 2))), {}),
        aten.polar.default: lambda d: ((d.positive(4, 2), d.real(4, 2)), {}),
        aten._conj.default: lambda d: ((_complex(d, 4, 2),), {}),
        aten.conj_physical.default: lambda d: ((_complex(d, 4, 2),), {}),
        aten.view_as_real.default: lambda d: ((_complex(d, *d.shape()),), {}),
        aten.view_as_complex.default: lambda d: ((d.real(*d.shape(), 2),), {}),
        aten._fft_r2c.default: lambda d: (
            (d.real(2, 4, 4), d.one([1], [2], [1, 2]), d.one(0, 1, 2), d.one(True, False)),
            {},
        ),
        aten._fft_c2r.default: lambda d: (
            (_complex(d, 2, 4, 3), d.one([2], [1, 2]), d.one(0, 2), d.one(4, 5)),
            {},
        ),
        aten._fft_c2c.default: lambda d: (
            (_complex(d, 2, 4, 2), d.one([0], [2], [1, 2]), d.one(0, 1), d.one(True, False)),
            {},
        ),
        **through(
            {
                (aten.elu.default, aten.elu_backward.default): lambda d: (
                    F.elu,
                    d.real(*d.shape()),
                ),
                (aten.leaky_relu.default, aten.leaky_relu_backward.default): lambda d: (
                    F.leaky_relu,
                    d.real(*d.shape()),
                ),
                (aten.hardtanh.default, aten.hardtanh_backward.default): lambda d: (
                    d.one(F.hardtanh, F.relu6),
                    d.real(*d.shape()),
                ),
                (aten.hardswish.default, aten.hardswish_backward.default): lambda d: (
                    F.hardswish,
                    d.real(*d.shape()),
                ),
                (aten.rrelu_with_noise_backward.default,): lambda d: (
                    lambda x: F.rrelu(x, training=True),
                    d.real(*d.shape()),
                ),
            }
        ),
    }
)
