"""Pooling, upsampling and their gradients: images and channels are independent."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.rules.notation import Notation, Rules, output_shapes, shape_of, tensor_arguments

aten = torch.ops.aten


def _image(node: fx.Node) -> Notation:
    inputs = tuple(("n", "c", *[""] * (len(shape_of(t)) - 2)) for t in tensor_arguments(node))
    outputs = tuple(("n", "c", *[""] * (len(s) - 2)) for s in output_shapes(node))
    return Notation(inputs, outputs, sums=False)


RULES: Rules = MappingProxyType(
    {
        aten.max_pool2d_with_indices.default: _image,
        aten.max_pool2d_with_indices_backward.default: _image,
        aten.avg_pool2d.default: _image,
        aten.avg_pool2d_backward.default: _image,
        aten._adaptive_avg_pool2d.default: _image,
        aten._adaptive_avg_pool2d_backward.default: _image,
        aten.upsample_bilinear2d.default: _image,
        aten.upsample_bilinear2d_backward.default: _image,
        aten.upsample_nearest2d.default: _image,
        aten.upsample_nearest2d_backward.default: _image,
    }
)
