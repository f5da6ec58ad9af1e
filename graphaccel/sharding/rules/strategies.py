"""Strategies: the legal ways to run one call with its tensors sharded over one mesh axis.

A rule (`sharding.rules.notation`) says which dims are the same index; a strategy (`Row`) is one
choice under it: a placement for every tensor that the call reads and returns. A call on one device
is the strategy in which all tensors are replicated; sharding an index gives a strategy, and so does
passing partial sums through where the call is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import fx

from graphaccel.ir.calls import arguments, is_random
from graphaccel.ir.values import operands
from graphaccel.kernels.register import fusion_of
from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.lowered import lowered_rows
from graphaccel.sharding.rules.notation import (
    Notation,
    groups,
    output_shapes,
    reshaped,
    shape_of,
    tensor_arguments,
)
from graphaccel.sharding.rules.ops.factories import COUNTS, UNIFORM
from graphaccel.sharding.rules.ops.pointwise import is_pointwise
from graphaccel.sharding.rules.ops.shapes import REGROUPS
from graphaccel.sharding.rules.shard import Placement, Row, Shard, Shards
from graphaccel.sharding.rules.table import rule_of

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

Carry: TypeAlias = Callable[[fx.Node, int], Iterator[tuple[tuple[Shard, ...], tuple[Shard, ...]]]]


def rows_of(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> tuple[Row, ...]:
    """Every strategy of a call whose tensors may be sharded as `inputs` and `outputs` say.

    In the first all tensors are replicated. inputs: by position among the call's tensor arguments;
    outputs: by tensor it returns. A shard of one tensor implies shards of the others, whether they
    are listed or not.
    """
    count, results = len(inputs), len(outputs)
    collected: dict[Row, None] = {
        Row((REPLICATED,) * count, (REPLICATED,) * results, divided=False): None
    }
    notation = rule_of(node)
    if notation is None:
        return tuple(collected)
    floating = _is_floating(node)
    if node.target in _CARRY:
        for sources, targets in _carried(node, ranks, inputs, outputs):
            collected[Row(sources, targets)] = None
    elif node.target in UNIFORM | COUNTS:
        for row in _factories(node, ranks, outputs):
            collected[row] = None
    else:
        for index, like in _indices(notation, inputs, outputs):
            if (like.padding or like.by) and not _takes_loose(node, like):
                continue
            row = _sharded(node, notation, index, like, ranks)
            if row is not None:
                collected[row] = None
    for row in lowered_rows(node, ranks, inputs, outputs):
        collected[row] = None
    if floating:
        for group in notation.linear:
            collected[
                Row(
                    tuple(PARTIAL if i in group else REPLICATED for i in range(count)),
                    tuple(REPLICATED if k in notation.kept else PARTIAL for k in range(results)),
                    divided=False,
                )
            ] = None
    return tuple(collected)


def _is_floating(node: fx.Node) -> bool:
    tensors = tensor_arguments(node)
    return bool(tensors) and all(
        v.is_floating_point()
        for v in (
            node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        )
        if isinstance(v, torch.Tensor)
    )


# ---- by index notation


def _indices(
    notation: Notation, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> list[tuple[str, Shard]]:
    """The indices that may be sharded, each with the form of its shard (dim 0 stands for its
    dim)."""
    collected: dict[tuple[str, Shard], None] = {}
    for names, shards in (
        *zip(notation.inputs, inputs, strict=True),
        *zip(notation.outputs, outputs, strict=True),
    ):
        for shard in sorted(shards):
            if shard.dim < len(names):
                collected[(names[shard.dim], replace(shard, dim=0))] = None
    return list(collected)


# Ops that compute each position of a dim alone, or sum over it: padding may be sharded too.
_PADDED = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.sum.dim_IntList,
        aten.expand.default,
    }
)


def _takes_loose(node: fx.Node, like: Shard) -> bool:
    """Whether padding, or positions chosen by experts, may be sharded. A fused op allows chosen
    positions where its rule does, but not padding: it may sum over it."""
    fused = bool(like.by) and fusion_of(node.target) is not None
    return fused or node.target in _PADDED or is_pointwise(node.target)


def _sharded(node: fx.Node, notation: Notation, index: str, like: Shard, ranks: int) -> Row | None:
    if index in ("", "1") or index in notation.whole:
        return None
    if is_random(node) and (like.by or node.target is not aten.native_dropout.default):
        return None
    shapes = [shape_of(t) for t in tensor_arguments(node)]
    results = output_shapes(node)
    inputs: list[Placement | None] = []
    outputs: list[Placement] = []
    seen = False
    for position, (names, shape) in enumerate(zip(notation.inputs, shapes, strict=True)):
        dims = [d for d, name in enumerate(names) if name == index]
        if position in notation.unread:
            inputs.append(None)
            continue
        if not dims:
            inputs.append(REPLICATED)
            continue
        shard = replace(like, dim=dims[0])
        if len(dims) > 1 or not shard.fits(shape, ranks):
            return None
        inputs.append(shard)
        seen = True
    for position, (names, shape) in enumerate(zip(notation.outputs, results, strict=True)):
        dims = [d for d, name in enumerate(names) if name == index]
        if dims:
            shard = replace(like, dim=dims[0])
            if len(dims) > 1 or not shard.fits(shape, ranks):
                return None
            outputs.append(shard)
        elif position in notation.kept:
            outputs.append(REPLICATED)
        elif notation.sums:
            outputs.append(PARTIAL)
        else:
            return None
    if not seen and (like.by or node.target is not aten.expand.default):
        return None
    lowering = "dropout" if is_random(node) else ""
    return Row(tuple(inputs), tuple(outputs), lowering)


def _factories(node: fx.Node, ranks: int, outputs: Sequence[Shards]) -> Iterator[Row]:
    """Tensors filled with a number: a shard is a smaller one; of a `like` op it follows its
    input."""
    if node.target in COUNTS or is_random(node):
        return
    tensors = tensor_arguments(node)
    (shape,) = output_shapes(node)
    for shard in sorted(outputs[0]):
        like = any("like" in str(node.target) for _ in tensors)
        if shard.fits(shape, ranks) and (like or not shard.by):  # no argument has its size
            inputs: tuple[Placement | None, ...] = tuple(shard if like else None for _ in tensors)
            yield Row(inputs, (shard,))


# ---- ops that move elements: shards follow the elements


def _carried(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[tuple[tuple[Shard, ...], tuple[Shard, ...]]]:
    forward, backward = _CARRY[node.target]
    shapes = [shape_of(t) for t in tensor_arguments(node)]
    results = output_shapes(node)
    pairs = [p for s in sorted(set().union(*inputs)) if (p := forward(node, s, ranks))]
    pairs += [p for s in sorted(set().union(*outputs)) if (p := backward(node, s, ranks))]
    for source, target in dict.fromkeys(pairs):
        if all(source.fits(s, ranks) for s in shapes) and all(
            target.fits(r, ranks) for r in results
        ):
            yield (source,) * len(shapes), (target,) * len(results)


def _regroup(
    source: Sequence[int], target: Sequence[int], shard: Shard, ranks: int
) -> Shard | None:
    """The shard of `target` that holds the same elements as a shard of a tensor of shape
    `source`."""
    if shard.padding or shard.by:
        group = next((g for g in groups(source, target) if shard.dim in g[0]), None)
        if group is None or not len(group[0]) == len(group[1]) == 1:
            return None
        return replace(shard, dim=group[1][0])
    result = reshaped(source, target, shard.dim, shard.outer, ranks)
    return None if result is None else Shard(*result)


Pair: TypeAlias = tuple[Shard, Shard]


def _reshape(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    (source,) = (shape_of(t) for t in tensor_arguments(node))
    target = _regroup(source, output_shapes(node)[0], shard, ranks)
    return None if target is None else (shard, target)


def _reshape_back(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    (target,) = (shape_of(t) for t in tensor_arguments(node))
    source = _regroup(output_shapes(node)[0], target, shard, ranks)
    return None if source is None else (source, shard)


def _section(whole: int, part: int, start: int) -> int | None:
    """The number of parts of a dim of which one is taken, if it is divided evenly."""
    if part == 0 or whole % part or start % part:
        return None
    return whole // part


def _taken(node: fx.Node, source: Sequence[int], target: Sequence[int]) -> tuple[int, int | None]:
    """The dim a slice is taken along, and how many such slices there are."""
    given = arguments(node)
    dim = int(given["dim"]) % len(source)
    start = _start(given, source[dim])
    even = given.get("step", 1) == 1
    return dim, _section(source[dim], target[dim], start) if even else None


def _start(given: Mapping[str, Any], size: int) -> int:
    start = given.get("start") or 0
    return max(0, start + size) if start < 0 else min(start, size)


def _along(dim: int, parts: int | None, *, narrows: bool) -> Callable[[Shard], Pair | None]:
    """Pairs of shards of a tensor of `parts` along a dim, and of one part. narrows: from the full
    tensor's."""

    def carry(shard: Shard) -> Pair | None:
        if shard.dim != dim:
            return shard, shard
        if parts is None or shard.padding or shard.by:
            return None
        if narrows:
            if shard.outer % parts:
                return None
            return shard, Shard(dim, shard.outer // parts)
        return Shard(dim, shard.outer * parts), shard

    return carry


def _slice(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    source, target = shape_of(tensor_arguments(node)[0]), output_shapes(node)[0]
    return _along(*_taken(node, source, target), narrows=True)(shard)


def _slice_back(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    source, target = shape_of(tensor_arguments(node)[0]), output_shapes(node)[0]
    return _along(*_taken(node, source, target), narrows=False)(shard)


def _put(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    """slice_backward: the part is the input, the full tensor the output."""
    part, whole = shape_of(tensor_arguments(node)[0]), output_shapes(node)[0]
    pair = _along(*_taken(node, whole, part), narrows=False)(shard)
    return None if pair is None else (pair[1], pair[0])


def _put_back(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    part, whole = shape_of(tensor_arguments(node)[0]), output_shapes(node)[0]
    pair = _along(*_taken(node, whole, part), narrows=True)(shard)
    return None if pair is None else (pair[1], pair[0])


def _pieces(node: fx.Node) -> tuple[int, int | None]:
    """The dim of a split and its number of pieces, None if their sizes differ."""
    results = output_shapes(node)
    dim = int(arguments(node)["dim"]) % len(results[0])
    return dim, len(results) if len({r[dim] for r in results}) == 1 else None


def _split(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    return _along(*_pieces(node), narrows=True)(shard)


def _split_back(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    return _along(*_pieces(node), narrows=False)(shard)


def _joined(node: fx.Node) -> tuple[int, int | None]:
    shapes = [shape_of(t) for t in tensor_arguments(node)]
    dim = int(arguments(node)["dim"]) % len(output_shapes(node)[0])
    same = len(set(shapes)) == 1
    return dim, len(shapes) if same else None


def _cat(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    pair = _along(*_joined(node), narrows=False)(shard)
    return None if pair is None else (pair[1], pair[0])


def _cat_back(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    pair = _along(*_joined(node), narrows=True)(shard)
    return None if pair is None else (pair[1], pair[0])


def _gathered(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    """An all-gather over another axis: the ranks' tensors concatenated."""
    pair = _along(0, int(operands(node)[1]), narrows=False)(shard)
    return None if pair is None else (pair[1], pair[0])


def _gathered_back(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    pair = _along(0, int(operands(node)[1]), narrows=True)(shard)
    return None if pair is None else (pair[1], pair[0])


def _scattered(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    return _along(0, int(operands(node)[2]), narrows=True)(shard)


def _scattered_back(node: fx.Node, shard: Shard, ranks: int) -> Pair | None:
    return _along(0, int(operands(node)[2]), narrows=False)(shard)


Follow: TypeAlias = Callable[[fx.Node, Shard, int], Pair | None]
_RESHAPES: tuple[Follow, Follow] = (_reshape, _reshape_back)
_CARRY: Mapping[Any, tuple[Follow, Follow]] = MappingProxyType(
    {
        **dict.fromkeys(REGROUPS, _RESHAPES),
        aten.slice.Tensor: (_slice, _slice_back),
        aten.slice_backward.default: (_put, _put_back),
        aten.split.Tensor: (_split, _split_back),
        aten.split_with_sizes.default: (_split, _split_back),
        aten.cat.default: (_cat, _cat_back),
        _c10d.all_gather_into_tensor.default: (_gathered, _gathered_back),
        _c10d.reduce_scatter_tensor.default: (_scattered, _scattered_back),
    }
)
