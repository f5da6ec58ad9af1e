"""Sharding rules of pooling, resampling and padding: the dims before the spatial ones are free."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

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
_FIRST = (frozenset({0}),)


def spatial(dims: int, *, linear: bool = False) -> Rule:
    """The last `dims` dims of every tensor are spatial; linear: in the first tensor."""

    def rule(node: fx.Node) -> Notation:
        inputs = tuple(_names(len(shape_of(t)), dims) for t in tensor_arguments(node))
        outputs = tuple(_names(len(s), dims) for s in output_shapes(node))
        return Notation(inputs, outputs, linear=_FIRST if linear else (), sums=False)

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


def _fractional(dims: int, samples: int) -> Rule:
    """fractional_max_pool: its random samples have one row for each image and channel; a tensor
    without a batch dim has samples with a batch of one."""

    def rule(node: fx.Node) -> Notation:
        full = len(output_shapes(node)[0])
        lead = index_names(full - dims)
        inputs = []
        for position, tensor in enumerate(tensor_arguments(node)):
            rank = len(shape_of(tensor))
            if position == samples:
                inputs.append((*("",) * (rank - 1 - len(lead)), *lead, ""))
            else:
                inputs.append((*lead, *("",) * (rank - len(lead))))
        outputs = tuple((*lead, *("",) * (len(s) - len(lead))) for s in output_shapes(node))
        return Notation(tuple(inputs), outputs, sums=False)

    return rule


def _grid(node: fx.Node) -> Notation:
    """grid_sampler: images [n, c, ...] sampled at positions [n, ..., 2 or 3]."""
    image, places = (len(shape_of(t)) for t in tensor_arguments(node))
    read = ("n", "c", *("",) * (image - 2))
    return Notation((read, _first(places)), (read,), linear=_FIRST, sums=False)


_ONE, _TWO, _THREE = (spatial(n) for n in (1, 2, 3))
_LINEAR_1, _LINEAR_2, _LINEAR_3 = (spatial(n, linear=True) for n in (1, 2, 3))

RULES: Rules = MappingProxyType(
    {
        aten.max_pool2d_with_indices.default: _TWO,
        aten.max_pool2d_with_indices_backward.default: _LINEAR_2,
        aten.max_pool3d_with_indices.default: _THREE,
        aten.max_pool3d_with_indices_backward.default: _LINEAR_3,
        aten.adaptive_max_pool2d.default: _TWO,
        aten.adaptive_max_pool2d_backward.default: _LINEAR_2,
        aten.adaptive_max_pool3d.default: _THREE,
        aten.adaptive_max_pool3d_backward.default: _LINEAR_3,
        aten.max_unpool2d.default: _LINEAR_2,
        aten.max_unpool3d.default: _LINEAR_3,
        aten.fractional_max_pool2d.default: _fractional(2, samples=1),
        aten.fractional_max_pool2d_backward.default: _LINEAR_2,
        aten.fractional_max_pool3d.default: _fractional(3, samples=1),
        aten.fractional_max_pool3d_backward.default: _LINEAR_3,
        aten.avg_pool2d.default: _LINEAR_2,
        aten.avg_pool2d_backward.default: _LINEAR_2,
        aten.avg_pool3d.default: _LINEAR_3,
        aten.avg_pool3d_backward.default: _LINEAR_3,
        aten._adaptive_avg_pool2d.default: _LINEAR_2,
        aten._adaptive_avg_pool2d_backward.default: _LINEAR_2,
        aten._adaptive_avg_pool3d.default: _LINEAR_3,
        aten._adaptive_avg_pool3d_backward.default: _LINEAR_3,
        aten.upsample_nearest1d.default: _LINEAR_1,
        aten.upsample_nearest1d_backward.default: _LINEAR_1,
        aten.upsample_nearest2d.default: _LINEAR_2,
        aten.upsample_nearest2d_backward.default: _LINEAR_2,
        aten.upsample_nearest3d.default: _LINEAR_3,
        aten.upsample_nearest3d_backward.default: _LINEAR_3,
        aten._upsample_nearest_exact1d.default: _LINEAR_1,
        aten._upsample_nearest_exact1d_backward.default: _LINEAR_1,
        aten._upsample_nearest_exact2d.default: _LINEAR_2,
        aten._upsample_nearest_exact2d_backward.default: _LINEAR_2,
        aten._upsample_nearest_exact3d.default: _LINEAR_3,
        aten._upsample_nearest_exact3d_backward.default: _LINEAR_3,
        aten.upsample_linear1d.default: _LINEAR_1,
        aten.upsample_linear1d_backward.default: _LINEAR_1,
        aten.upsample_bilinear2d.default: _LINEAR_2,
        aten.upsample_bilinear2d_backward.default: _LINEAR_2,
        aten.upsample_trilinear3d.default: _LINEAR_3,
        aten.upsample_trilinear3d_backward.default: _LINEAR_3,
        aten.upsample_bicubic2d.default: _LINEAR_2,
        aten.upsample_bicubic2d_backward.default: _LINEAR_2,
        aten._upsample_bilinear2d_aa.default: _LINEAR_2,
        aten._upsample_bilinear2d_aa_backward.default: _LINEAR_2,
        aten._upsample_bicubic2d_aa.default: _LINEAR_2,
        aten._upsample_bicubic2d_aa_backward.default: _LINEAR_2,
        aten.reflection_pad1d.default: _LINEAR_1,
        aten.reflection_pad1d_backward.default: _LINEAR_1,
        aten.reflection_pad2d.default: _LINEAR_2,
        aten.reflection_pad2d_backward.default: _LINEAR_2,
        aten.reflection_pad3d.default: _LINEAR_3,
        aten.reflection_pad3d_backward.default: _LINEAR_3,
        aten.replication_pad1d.default: _LINEAR_1,
        aten.replication_pad1d_backward.default: _LINEAR_1,
        aten.replication_pad2d.default: _LINEAR_2,
        aten.replication_pad2d_backward.default: _LINEAR_2,
        aten.replication_pad3d.default: _LINEAR_3,
        aten.replication_pad3d_backward.default: _LINEAR_3,
        aten.pixel_shuffle.default: _LINEAR_3,
        aten.pixel_unshuffle.default: _LINEAR_3,
        aten.channel_shuffle.default: _examples,
        aten.im2col.default: _examples,
        aten.col2im.default: _examples,
        aten.grid_sampler_2d.default: _grid,
        aten.grid_sampler_2d_backward.default: _examples,
        aten.grid_sampler_3d.default: _grid,
        aten.grid_sampler_3d_backward.default: _examples,
        aten.affine_grid_generator.default: _examples,
    }
)
