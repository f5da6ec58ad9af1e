"""Sharding rules of indexing, gather, scatter and embedding, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import cast

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.sharding.rules.notation import (
    Indices,
    Notation,
    Rule,
    Rules,
    index_names,
    name_at,
    named_dims,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.reshape.default,
        aten._to_copy.default,
    }
)
_COUNTS = frozenset({aten.arange.default, aten.arange.start})
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
_FILLS = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default})


def counts_rows(node: fx.Node, size: int) -> bool:
    """Whether a node is `arange(size)`, possibly reshaped: it numbers the rows of a tensor."""
    while node.target in _RESHAPES:
        node = cast(fx.Node, node.args[0])
    return node.target in _COUNTS and shape_of(node) == (size,)


def only_counts_rows(node: fx.Node) -> bool:
    """Whether all readers of an `arange` use it as the row numbers of a tensor.

    A shard of such an `arange` may count from zero, as the rows of each shard do.
    """
    reached, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user.target in _RESHAPES and user not in reached:
                reached.add(user)
                stack.append(user)
            elif user.target not in (aten.index.Tensor, aten.index_put.default):
                return False
            elif not _look_up(user)[3] or _uses(user, reached) != 1:
                return False
    return True


def _uses(node: fx.Node, nodes: set[fx.Node]) -> int:
    """How many of a look-up's arguments are among `nodes`."""
    return sum(n in nodes for n in tensor_arguments(node))


def _is_zero(node: fx.Node) -> bool:
    filled = node.target in _FILLS and arguments(node)["fill_value"] == 0
    return node.target in _ZEROS or filled


def takes_rows(node: fx.Node) -> bool:
    """Whether a look-up or its gradient has one index array, of rows that are not numbered."""
    positions = arguments(node)["indices"]
    if len(positions) != 1 or not isinstance(positions[0], fx.Node):
        return False
    source, *_ = tensor_arguments(node)
    if node.target is aten.index_put.default:
        if not arguments(node)["accumulate"] or not _is_zero(source):
            return False
    return not counts_rows(positions[0], shape_of(source)[0])


def _look_up(node: fx.Node) -> tuple[list[Indices], Indices, frozenset[str], bool]:
    """The common part of `x[i, j]` and its gradient.

    Returns the indices of x and of each index array, those of the result, the dims of x that cannot
    be sharded, and whether a row is taken from (put into) the same row: where an index array
    numbers the rows themselves (`x[arange(b), last]`), row r of the result needs row r of x only.
    """
    source, *_ = tensor_arguments(node)
    positions = arguments(node)["indices"]
    shape = shape_of(source)
    used = [i for i, n in enumerate(positions) if isinstance(n, fx.Node)]
    arrays = [shape_of(positions[i]) for i in used]
    joint_shape = torch.broadcast_shapes(*arrays)
    width = len(joint_shape)
    joint = tuple(f"j{k}" for k in range(width))
    names = list(index_names(len(shape)))
    whole = {names[i] for i in used}
    first = used[0]
    rowwise = counts_rows(positions[first], shape[first])
    if rowwise:
        array = arrays[0]
        rows = next(k for k, n in enumerate(array) if n == shape[first])
        whole.discard(names[first])
        names[first] = joint[width - len(array) + rows]
    inputs: list[Indices] = [tuple(names)]
    for array in arrays:
        offset = width - len(array)
        inputs.append(
            tuple(
                "1" if n == 1 and joint_shape[offset + k] != 1 else joint[offset + k]
                for k, n in enumerate(array)
            )
        )
    contiguous = used == list(range(used[0], used[-1] + 1))
    rest = [n for i, n in enumerate(names) if i not in used]
    at = used[0] if contiguous else 0
    return inputs, (*rest[:at], *joint, *rest[at:]), frozenset(whole), rowwise


def _index(node: fx.Node) -> Notation:
    """`x[i]`, `x[:, i]`, `x[rows, columns]`: indexed dims of x cannot be sharded, the others
    can."""
    inputs, out, whole, _ = _look_up(node)
    return Notation(tuple(inputs), (out,), whole, (frozenset({0}),), sums=False)


def _index_put(node: fx.Node) -> Notation:
    """The gradient of indexing, added into zeros: a partial sum where each shard adds its own part.

    With anything but zeros the initial values would count once per shard, and without accumulation
    later shards would overwrite earlier ones: then only rows that stay rows can be sharded.
    """
    inputs, full, whole, _ = _look_up(node)
    base, *_ = tensor_arguments(node)
    shape = shape_of(tensor_arguments(node)[-1])
    sizes = {i: n for i, n in _sizes(inputs, node) if i != "1"}
    tail = full[len(full) - len(shape) :]
    inputs.append(tuple("1" if n == 1 != sizes[i] else i for n, i in zip(shape, tail, strict=True)))
    sums = bool(arguments(node)["accumulate"]) and _is_zero(base)
    last = len(inputs) - 1
    return Notation(tuple(inputs), (inputs[0],), whole, (frozenset({0, last}),), sums=sums)


def _sizes(inputs: list[Indices], node: fx.Node) -> Iterator[tuple[str, int]]:
    """Every index of a call's inputs with its size."""
    for indices, tensor in zip(inputs, tensor_arguments(node), strict=False):
        yield from zip(indices, shape_of(tensor), strict=True)


def _index_select(node: fx.Node) -> Notation:
    names = named_dims(node)
    whole = name_at(names, arguments(node)["dim"])
    out = tuple("j" if n == whole else n for n in names)
    index = ("j",) if shape_of(tensor_arguments(node)[1]) else ()
    return Notation((names, index), (out,), frozenset({whole}), (frozenset({0}),), sums=False)


def _index_fill(node: fx.Node) -> Notation:
    """index_fill: linear in the tensor and, if it is a tensor, the value."""
    names = named_dims(node)
    whole = frozenset({name_at(names, arguments(node)["dim"])})
    tensors = tensor_arguments(node)
    index = ("",) * len(shape_of(tensors[1]))
    if len(tensors) == 3:
        return Notation((names, index, ()), (names,), whole, (frozenset({0, 2}),))
    linear = (frozenset({0}),) if arguments(node)["value"] == 0 else ()
    return Notation((names, index), (names,), whole, linear)


def _index_add(node: fx.Node) -> Notation:
    """index_add: rows added at given positions. Added to zeros, each shard may add its own."""
    names = named_dims(node)
    base, index, _ = tensor_arguments(node)
    whole = name_at(names, arguments(node)["dim"])
    adds, copies = node.target is aten.index_add.default, node.target is aten.index_copy.default
    put = tuple("j" if n == whole else n for n in names)
    linear = (frozenset({0, 2}),) if adds or copies else ()
    inputs = (names, ("j",) if shape_of(index) else (), put)
    return Notation(inputs, (names,), frozenset({whole}), linear, sums=adds and _is_zero(base))


def _along(node: fx.Node) -> tuple[Indices, Indices, frozenset[str]]:
    """For gather and scatter: names of the tensor, of the index, and of the dims not sharded.

    The looked-up dim has another name in the index. Dims along which the index is shorter cannot be
    sharded: their shards would not match.
    """
    source, index = (shape_of(t) for t in tensor_arguments(node)[:2])
    if len(source) != len(index):  # a number read as a tensor of one element
        return ("",) * len(source), ("",) * len(index), frozenset({""})
    names = index_names(len(source))
    looked = name_at(names, arguments(node)["dim"])
    whole = {n for n, a, b in zip(names, source, index, strict=True) if a != b} | {looked}
    return names, tuple("j" if n == looked else n for n in names), frozenset(whole)


def _gather(node: fx.Node) -> Notation:
    names, at, whole = _along(node)
    return Notation((names, at), (at,), whole, (frozenset({0}),), sums=False)


def _scatter(node: fx.Node) -> Notation:
    """Overwritten elements come from `src`, the rest from `self`: linear in both together.

    When added to zeros, each shard may add its own part. Dims along which `src` is longer than the
    index cannot be sharded.
    """
    names, at, whole = _along(node)
    base, *others = tensor_arguments(node)
    index, source = (shape_of(t) for t in others)
    put = at if len(source) == len(at) else ("",) * len(source)
    whole |= {n for n, a, b in zip(at, index, source, strict=False) if a != b}
    given = arguments(node)
    linear = given.get("reduce", "sum") == "sum" and given.get("include_self", True)
    groups = (frozenset({0, 2}),) if linear else ()
    sums = node.target is aten.scatter_add.default and _is_zero(base)
    return Notation((names, at, put), (names,), whole, groups, sums=sums)


def _scatter_value(node: fx.Node) -> Notation:
    names, at, whole = _along(node)
    linear = (frozenset({0}),) if arguments(node)["value"] == 0 else ()
    return Notation((names, at), (names,), whole, linear, sums=False)


def _flat(*groups: tuple[int, ...]) -> Rule:
    """take, put, masked_scatter: elements are numbered over all dims, so none can be sharded."""

    def rule(node: fx.Node) -> Notation:
        inputs = tuple(("",) * len(shape_of(t)) for t in tensor_arguments(node))
        outputs = tuple(("",) * len(s) for s in output_shapes(node))
        return Notation(inputs, outputs, linear=tuple(frozenset(g) for g in groups))

    return rule


def _take(node: fx.Node) -> Notation:
    """take: the positions may be sharded."""
    source, index = (shape_of(t) for t in tensor_arguments(node))
    at = index_names(len(index))
    return Notation((("",) * len(source), at), (at,), linear=(frozenset({0}),))


def _embedding(node: fx.Node) -> Notation:
    names = index_names(len(shape_of(tensor_arguments(node)[1])))
    return Notation((("v", "h"), names), ((*names, "h"),), frozenset({"v"}), (frozenset({0}),))


def _embedding_backward(node: fx.Node) -> Notation:
    """Each shard adds its own rows, unless rows are divided by their frequency in the batch."""
    names = index_names(len(shape_of(tensor_arguments(node)[1])))
    whole = frozenset(names) if arguments(node)["scale_grad_by_freq"] else frozenset()
    return Notation(((*names, "h"), names), (("", "h"),), whole, (frozenset({0}),))


RULES: Rules = MappingProxyType(
    {
        aten.index.Tensor: _index,
        aten.index_put.default: _index_put,
        aten.index_select.default: _index_select,
        aten.gather.default: _gather,
        aten.scatter_add.default: _scatter,
        aten.scatter.src: _scatter,
        aten.scatter.value: _scatter_value,
        aten.scatter_reduce.two: _scatter,
        aten.index_add.default: _index_add,
        aten.index_copy.default: _index_add,
        aten.index_reduce.default: _index_add,
        aten.index_fill.int_Scalar: _index_fill,
        aten.index_fill.int_Tensor: _index_fill,
        aten.take.default: _take,
        aten.put.default: _flat((0, 2)),
        aten.masked_scatter.default: _flat((0, 2)),
        aten.masked_scatter_backward.default: _flat((0,)),
        aten.embedding.default: _embedding,
        aten.embedding_dense_backward.default: _embedding_backward,
    }
)
