"""Look-ups by index tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import cast

import torch
from torch import fx

from graphaccel.rules.notation import (
    Indices,
    Notation,
    Rules,
    arguments,
    index_names,
    named_dims,
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
    """Whether a node is `arange(size)`, perhaps reshaped: it numbers the rows of a tensor."""
    while node.target in _RESHAPES:
        node = cast(fx.Node, node.args[0])
    return node.target in _COUNTS and shape_of(node) == (size,)


def only_counts_rows(node: fx.Node) -> bool:
    """Whether all that reads an `arange` takes it as the numbers of a tensor's own rows.

    Such a part of it may count from zero, as each part's rows do.
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
    """What `x[i, j]` and its gradient have in common.

    Gives the indices of x and of each index array, those of the result, the dims of x that stay
    whole, and whether a row is taken from (put into) the same row: where an index array counts the
    rows themselves (`x[arange(b), last]`), row r of the result needs row r of x only.
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
    """`x[i]`, `x[:, i]`, `x[rows, columns]`: indexed dims of x stay whole, the others follow."""
    inputs, out, whole, _ = _look_up(node)
    return Notation(tuple(inputs), (out,), whole, (frozenset({0}),), sums=False)


def _index_put(node: fx.Node) -> Notation:
    """The gradient of indexing, added into zeros: where each part adds its own, a partial sum.

    Into anything but zeros that would count what was there once a part, and without accumulation
    later parts would overwrite earlier ones: then only rows that stay rows can be sharded.
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
    dim = arguments(node)["dim"] % len(names)
    out = (*names[:dim], "j", *names[dim + 1 :])
    whole = frozenset({names[dim]})
    return Notation((names, ("j",)), (out,), whole, (frozenset({0}),), sums=False)


def _unequal(node: fx.Node, names: Indices) -> set[str]:
    """Dims along which the index tensor is shorter than what it indexes: row r is not row r's
    part."""
    source, index = tensor_arguments(node)[:2]
    pairs = zip(names, shape_of(source), shape_of(index), strict=True)
    return {name for name, m, n in pairs if m != n}


def _gather(node: fx.Node) -> Notation:
    names = named_dims(node)
    whole = _unequal(node, names) | {names[arguments(node)["dim"] % len(names)]}
    return Notation((names, names), (names,), frozenset(whole), (frozenset({0}),), sums=False)


def _scatter_add(node: fx.Node) -> Notation:
    names = named_dims(node)
    whole = _unequal(node, names) | {names[arguments(node)["dim"] % len(names)]}
    return Notation((names, names, names), (names,), frozenset(whole), (frozenset({0, 2}),))


def _scatter(node: fx.Node) -> Notation:
    """What is written over comes from `src`, the rest from `self`: linear in both together."""
    names = named_dims(node)
    whole = _unequal(node, names) | {names[arguments(node)["dim"] % len(names)]}
    return Notation((names, names, names), (names,), frozenset(whole), (frozenset({0, 2}),))


def _scatter_value(node: fx.Node) -> Notation:
    names = named_dims(node)
    whole = _unequal(node, names) | {names[arguments(node)["dim"] % len(names)]}
    return Notation((names, names), (names,), frozenset(whole))


def _embedding(node: fx.Node) -> Notation:
    names = index_names(len(shape_of(tensor_arguments(node)[1])))
    return Notation((("v", "h"), names), ((*names, "h"),), frozenset({"v"}), (frozenset({0}),))


def _embedding_backward(node: fx.Node) -> Notation:
    """Each part adds its own rows, unless rows are divided by how often they occur in the batch."""
    names = index_names(len(shape_of(tensor_arguments(node)[1])))
    whole = frozenset(names) if arguments(node)["scale_grad_by_freq"] else frozenset()
    return Notation(((*names, "h"), names), (("", "h"),), whole, (frozenset({0}),))


RULES: Rules = MappingProxyType(
    {
        aten.index.Tensor: _index,
        aten.index_put.default: _index_put,
        aten.index_select.default: _index_select,
        aten.gather.default: _gather,
        aten.scatter_add.default: _scatter_add,
        aten.scatter.src: _scatter,
        aten.scatter.value: _scatter_value,
        aten.embedding.default: _embedding,
        aten.embedding_dense_backward.default: _embedding_backward,
    }
)
