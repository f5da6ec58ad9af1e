"""Random small calls of ops on images: pooling, resampling, padding, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.ops.calls import Case, Draw
from tests.support.recorded import Traced, through

aten = torch.ops.aten


def _both(name: str, overload: str = "default") -> tuple[Any, ...]:
    """An op and its backward."""
    return getattr(getattr(aten, name), overload), getattr(aten, f"{name}_backward").default


def _image(spatial: int, function: Callable[..., Any], *rest: Any) -> Traced:
    """function(x, *rest) on images of so many spatial dims, with or without a dim of examples."""

    def draw(d: Draw) -> tuple[Any, ...]:
        return (function, d.real(*d.one([2, 4], [4, 2], [4]), *[4, 6, 4][:spatial]), *rest)

    return draw


def _batch(spatial: int, function: Callable[..., Any], *rest: Any) -> Traced:
    """The same, always with examples."""
    return lambda d: (function, d.real(*d.one([2, 4], [4, 2]), *[4, 6, 4][:spatial]), *rest)


def _resampled(spatial: int, mode: str, **kwargs: Any) -> Traced:
    def function(x: Tensor) -> Tensor:
        return F.interpolate(x, size=[8, 3, 6][:spatial], mode=mode, **kwargs)

    return _batch(spatial, function)


def _padded(spatial: int, mode: str) -> Traced:
    return _image(spatial, lambda x: F.pad(x, [1, 2] * spatial, mode=mode))


def _fractional(function: Callable[..., Tensor], spatial: int) -> Traced:
    def draw(d: Draw) -> tuple[Any, ...]:
        lead = d.one([2, 4], [4])
        samples = torch.rand(*([1] * (2 - len(lead))), *lead, spatial, dtype=torch.float64)
        x = d.real(*lead, *[4, 6, 4][:spatial])
        return (lambda x: function(x, 2, output_size=2, _random_samples=samples), x)

    return draw


def _unpooled(spatial: int) -> Traced:
    pool = getattr(F, f"max_pool{spatial}d")
    unpool = getattr(F, f"max_unpool{spatial}d")

    def function(x: Tensor) -> Tensor:
        out, where = pool(x, 2, return_indices=True)
        return unpool(out, where, 2)

    return _batch(spatial, function)


def _sampled(spatial: int) -> Traced:
    def draw(d: Draw) -> tuple[Any, ...]:
        n = d.size()
        grid = d.real(n, *[4, 2, 3][:spatial], spatial)
        return (lambda x, g: F.grid_sample(x, g, align_corners=False),
                d.real(n, 2, *[4, 6, 4][:spatial]), grid)  # fmt: skip

    return draw


CASES: Mapping[Any, Case] = MappingProxyType(
    through(
        {
            _both("max_pool2d_with_indices"): _image(2, F.max_pool2d, 2),
            _both("max_pool3d_with_indices"): _image(3, F.max_pool3d, 2),
            _both("adaptive_max_pool2d"): _image(2, F.adaptive_max_pool2d, 2),
            _both("adaptive_max_pool3d"): _image(3, F.adaptive_max_pool3d, 2),
            (aten.max_unpool2d.default,): _unpooled(2),
            (aten.max_unpool3d.default,): _unpooled(3),
            _both("fractional_max_pool2d"): _fractional(F.fractional_max_pool2d, 2),
            _both("fractional_max_pool3d"): _fractional(F.fractional_max_pool3d, 3),
            _both("avg_pool2d"): _image(2, F.avg_pool2d, 2),
            _both("avg_pool3d"): _image(3, F.avg_pool3d, 2),
            _both("_adaptive_avg_pool2d"): _image(2, F.adaptive_avg_pool2d, 2),
            _both("_adaptive_avg_pool3d"): _image(3, F.adaptive_avg_pool3d, 2),
            _both("upsample_nearest1d"): _resampled(1, "nearest"),
            _both("upsample_nearest2d"): _resampled(2, "nearest"),
            _both("upsample_nearest3d"): _resampled(3, "nearest"),
            _both("_upsample_nearest_exact1d"): _resampled(1, "nearest-exact"),
            _both("_upsample_nearest_exact2d"): _resampled(2, "nearest-exact"),
            _both("_upsample_nearest_exact3d"): _resampled(3, "nearest-exact"),
            _both("upsample_linear1d"): _resampled(1, "linear"),
            _both("upsample_bilinear2d"): _resampled(2, "bilinear"),
            _both("upsample_trilinear3d"): _resampled(3, "trilinear"),
            _both("upsample_bicubic2d"): _resampled(2, "bicubic"),
            _both("_upsample_bilinear2d_aa"): _resampled(2, "bilinear", antialias=True),
            _both("_upsample_bicubic2d_aa"): _resampled(2, "bicubic", antialias=True),
            _both("reflection_pad1d"): _padded(1, "reflect"),
            _both("reflection_pad2d"): _padded(2, "reflect"),
            _both("reflection_pad3d"): _padded(3, "reflect"),
            _both("replication_pad1d"): _padded(1, "replicate"),
            _both("replication_pad2d"): _padded(2, "replicate"),
            _both("replication_pad3d"): _padded(3, "replicate"),
            (aten.pixel_shuffle.default,): lambda d: (
                lambda x: F.pixel_shuffle(x, 2),
                d.real(*d.one([], [2], [4, 2]), 4, 2, 3),
            ),
            (aten.pixel_unshuffle.default,): lambda d: (
                lambda x: F.pixel_unshuffle(x, 2),
                d.real(*d.one([], [2]), 1, 4, 4),
            ),
            (aten.channel_shuffle.default,): _batch(2, F.channel_shuffle, 2),
            (aten.im2col.default, aten.col2im.default): _batch(2, F.unfold, 2),
            _both("grid_sampler_2d"): _sampled(2),
            _both("grid_sampler_3d"): _sampled(3),
            (aten.affine_grid_generator.default,): lambda d: (
                lambda theta: F.affine_grid(theta, [len(theta), 2, 4, 3], align_corners=False),
                d.real(d.size(), 2, 3),
            ),
        }
    )
)
