"""Sharding rules of normalisations: layer and group norm act per example, batch norm over all."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.sharding.rules.notation import (
    Indices,
    Notation,
    Rules,
    index_names,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_FIRST = (frozenset({0}),)


def _layer_dims(node: fx.Node) -> tuple[Indices, Indices, Indices]:
    """Indices of the input, of its normalised dims, and of the statistics."""
    rank = len(shape_of(tensor_arguments(node)[0]))
    inner = len(arguments(node)["normalized_shape"])
    outer, normal = index_names(rank - inner), tuple(f"d{k}" for k in range(inner))
    return (*outer, *normal), normal, (*outer, *("1",) * inner)


def _layer_norm(node: fx.Node) -> Notation:
    """Examples are independent, the normalised dims cannot be sharded."""
    full, normal, statistics = _layer_dims(node)
    inputs = (full, *(normal for _ in tensor_arguments(node)[1:]))
    return Notation(inputs, (full, statistics, statistics), frozenset(normal), sums=False)


def _layer_norm_backward(node: fx.Node) -> Notation:
    full, normal, statistics = _layer_dims(node)
    inputs = [full, full, statistics, statistics]
    inputs += [normal for _ in tensor_arguments(node)[4:]]
    wanted = zip((full, normal, normal), arguments(node)["output_mask"], strict=True)
    outputs = tuple(names for names, on in wanted if on)
    return Notation(tuple(inputs), outputs, frozenset(normal), _FIRST)


def _image_dims(node: fx.Node) -> Indices:
    rank = len(shape_of(tensor_arguments(node)[0]))
    return ("n", "c", *[""] * (rank - 2))


def _group_norm(node: fx.Node) -> Notation:
    image = _image_dims(node)
    inputs = (image, *(("c",) for _ in tensor_arguments(node)[1:]))
    return Notation(inputs, (image, ("n", ""), ("n", "")), frozenset({"c"}), sums=False)


def _group_norm_backward(node: fx.Node) -> Notation:
    image = _image_dims(node)
    inputs = [image, image, ("n", ""), ("n", ""), *(("c",) for _ in tensor_arguments(node)[4:])]
    wanted = zip((image, ("c",), ("c",)), arguments(node)["output_mask"], strict=True)
    outputs = tuple(names for names, on in wanted if on)
    return Notation(tuple(inputs), outputs, frozenset({"c"}), _FIRST)


def _batch_norm(node: fx.Node) -> Notation:
    """Batch statistics mix examples; with running statistics examples are independent."""
    image = _image_dims(node)
    given = arguments(node)
    mixes = given.get("training", given.get("train", False))
    inputs = tuple(image if len(shape_of(t)) > 1 else ("c",) for t in tensor_arguments(node))
    outputs = tuple(image if len(s) > 1 else ("c",) for s in output_shapes(node))
    if "train" in given:
        whole = frozenset({"n"} if mixes else set())
        return Notation(inputs, outputs, whole, _FIRST, sums=not mixes)
    if mixes:
        return Notation(inputs, outputs, frozenset({"n"}), sums=False)
    # Running statistics are passed through: the same on every shard, so not a sum over shards.
    return Notation(inputs, (image, *outputs[1:]), kept=_statistics(node))


def _statistics(node: fx.Node) -> frozenset[int]:
    return frozenset(range(1, len(output_shapes(node))))


def _weight_norm(node: fx.Node) -> Notation:
    inputs = tuple(("",) * len(shape_of(t)) for t in tensor_arguments(node))
    return Notation(inputs, tuple(("",) * len(s) for s in output_shapes(node)), sums=False)


def _weight_norm_backward(node: fx.Node) -> Notation:
    result = _weight_norm(node)
    return Notation(result.inputs, result.outputs, linear=_FIRST, sums=False)


RULES: Rules = MappingProxyType(
    {
        aten.native_layer_norm.default: _layer_norm,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_backward,
        aten._native_batch_norm_legit_functional.default: _batch_norm,
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
        aten._native_batch_norm_legit.no_stats: _batch_norm,
        aten.native_batch_norm.default: _batch_norm,
        aten.native_batch_norm_backward.default: _batch_norm,
        aten._weight_norm_interface.default: _weight_norm,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
    }
)
