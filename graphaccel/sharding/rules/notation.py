"""Sharding rules in index notation, as in einsum: which tensor dims are the same index.

    "m k, k n -> m n"    sharding m shards the output's first dim; sharding k makes it a partial sum
    "... d -> ... d"     with whole={"d"}: d cannot be sharded

One rule describes one mesh axis (or the virtual axis, time, over which the batch is split into
microbatches). Partial sums pass through an op where it is linear: `linear` lists the groups of
inputs in which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

Indices = tuple[str, ...]


@dataclass(frozen=True)
class Notation:
    """The rule of one node, with its indices written out.

    inputs, outputs: an index name per tensor dim, for each tensor argument in order (lists
      flattened, repetitions included) and each tensor output. "1" is a broadcast dim, "" one that
      no other tensor shares.
    whole: indices that cannot be sharded.
    linear: groups of input positions; the output is linear in the inputs of a group taken together.
    sums: whether a contracted index is summed (else sharding it is illegal).
    unread: input positions whose value the op does not read (any placement will do).
    kept: output positions that do not depend on what is sharded, nor on inputs in `linear`: the
      same for every part.
    """

    inputs: tuple[Indices, ...]
    outputs: tuple[Indices, ...]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    sums: bool = True
    unread: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def written(rule: Notation) -> str:
    """A rule as text: `m k, k n -> m n`; dims without a name of their own are a, b, c, ...

    It ends with, where not empty, the names that cannot be sharded and the index that is not
    summed.
    """
    free = (c for c in "abcdefghijlnopqrstuvwxyz" if not _occurs(rule, c))
    known: dict[str, str] = {"": "_", "1": "1"}

    def name(index: str) -> str:
        if index not in known:
            known[index] = index if index[0].isalpha() else next(free)
        return known[index]

    sides = [
        ", ".join(" ".join(map(name, names)) or "()" for names in tensors)
        for tensors in (rule.inputs, rule.outputs)
    ]
    text = " -> ".join(sides)
    inputs = [i for names in rule.inputs for i in names]
    whole = [known[i] for i in dict.fromkeys(inputs) if i in rule.whole]
    if whole:
        text += f"   whole: {' '.join(whole)}"
    kept = {i for names in rule.outputs for i in names} | rule.whole | {"", "1"}
    lost = [known[i] for i in dict.fromkeys(inputs) if i not in kept]
    if lost and not rule.sums:
        text += f"   not summed: {' '.join(lost)}"
    return text


def _occurs(rule: Notation, name: str) -> bool:
    return any(name in names for names in (*rule.inputs, *rule.outputs))


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments that are tensors, in order, repetitions included."""
    nodes: list[fx.Node] = []
    _collect(node.args, nodes)
    if node.kwargs:
        _collect(node.kwargs.values(), nodes)
    return nodes


def _collect(values: Iterable[Any], nodes: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("val"), torch.Tensor):
                nodes.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, nodes)
        elif isinstance(value, dict):
            _collect(value.values(), nodes)
        elif isinstance(value, slice):
            _collect((value.start, value.stop, value.step), nodes)


Rule = Callable[[fx.Node], Notation]
Rules = Mapping[Any, Rule]


def index_names(count: int) -> Indices:
    """Names for the dims of one tensor: `.0 .1 .2`."""
    return tuple(f".{k}" for k in range(count))


def named_dims(node: fx.Node) -> Indices:
    """`index_names` of a call's first tensor argument."""
    return index_names(len(shape_of(tensor_arguments(node)[0])))


def name_at(names: Indices, dim: int) -> str:
    """The name of a dim counted from either end; "" for the one a 0-d tensor is taken to have."""
    return names[dim % len(names)] if names else ""


def text(rule: str, *, whole: str = "", linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    """A rule function from its text in einsum notation."""
    return lambda node: einsum(rule, node, whole=whole.split(), linear=linear)


def same_dims(node: fx.Node) -> Notation:
    """One tensor in, one out, with the same dims, linear."""
    names = named_dims(node)
    return Notation((names,), (names,), linear=(frozenset({0}),))


def kept_whole(node: fx.Node) -> Notation:
    """No dim of the inputs can be sharded."""
    shapes = [shape_of(tensor) for tensor in tensor_arguments(node)]
    inputs = tuple(tuple(f"{i}.{k}" for k in range(len(s))) for i, s in enumerate(shapes))
    outputs = tuple(("",) * len(shape) for shape in output_shapes(node))
    return Notation(inputs, outputs, frozenset(name for names in inputs for name in names))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a node's tensor."""
    return tuple(int(n) for n in node.meta["val"].shape)


def output_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """The sizes of each tensor a node returns (one for a plain tensor)."""
    value = node.meta["val"]
    values = [value] if isinstance(value, torch.Tensor) else list(value)
    return [tuple(int(n) for n in v.shape) for v in values if isinstance(v, torch.Tensor)]


def einsum(
    text: str,
    node: fx.Node,
    *,
    whole: Iterable[str] = (),
    linear: Sequence[Iterable[int]] = (),
    sums: bool = True,
) -> Notation:
    """A rule from its text. `...` stands for the leading dims of the widest input that has it."""
    left, right = text.split("->")
    inputs = [t.split() for t in left.split(",")]
    outputs = [t.split() for t in right.split(",")]
    shapes = [shape_of(n) for n in tensor_arguments(node)]
    if len(inputs) != len(shapes):
        raise ValueError(f"rule {text!r} names {len(inputs)} tensors, the call has {len(shapes)}")
    widths = [len(s) - len(i) + 1 for s, i in zip(shapes, inputs, strict=True) if "..." in i]
    width = max(widths, default=0)
    dots = [f".{k}" for k in range(width)]

    def spelled(names: list[str], rank: int) -> Indices:
        if "..." not in names:
            return tuple(names)
        at = names.index("...")
        count = rank - (len(names) - 1)
        return (*names[:at], *dots[width - count :], *names[at + 1 :])

    return Notation(
        tuple(spelled(i, len(s)) for i, s in zip(inputs, shapes, strict=True)),
        tuple(spelled(o, len(s)) for o, s in zip(outputs, output_shapes(node), strict=True)),
        frozenset(whole),
        tuple(frozenset(g) for g in linear),
        sums,
    )


def broadcast(node: fx.Node, *, linear: Sequence[Iterable[int]] = ()) -> Notation:
    """The rule of an elementwise op with broadcasting."""
    (out,) = output_shapes(node)[:1]
    names = index_names(len(out))

    def aligned(shape: tuple[int, ...]) -> Indices:
        tail = names[len(names) - len(shape) :]
        return tuple(
            "1" if n == 1 and out[-(len(shape) - i)] != 1 else tail[i] for i, n in enumerate(shape)
        )

    return Notation(
        tuple(aligned(shape_of(n)) for n in tensor_arguments(node)),
        tuple(names for _ in output_shapes(node)),
        linear=tuple(frozenset(g) for g in linear),
    )


def regrouped(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Indices of a reshape: the outermost dims of groups with equal products are the same index.

    `[8,16,32] -> [128,32]` gives `(a, "", b)` and `(a, b)`: the leading 8 of 128 = 8 x 16 can be
    sharded.
    """
    left, right = [""] * len(source), [""] * len(target)
    if 0 in source:
        return tuple(left), tuple(right)
    i = j = group = 0
    while i < len(source) and j < len(target):
        if source[i] == 1 and target[j] != 1:
            i += 1
            continue
        if target[j] == 1 and source[i] != 1:
            j += 1
            continue
        left[i] = right[j] = f"g{group}"
        group += 1
        m, n = source[i], target[j]
        i, j = i + 1, j + 1
        while m != n:
            if m < n:
                m, i = m * source[i], i + 1
            else:
                n, j = n * target[j], j + 1
    return tuple(left), tuple(right)


def groups(
    source: Sequence[int], target: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Dims of both shapes in groups of equal products; dims of size one are in none."""
    left = [d for d, n in enumerate(source) if n != 1]
    right = [d for d, n in enumerate(target) if n != 1]
    results = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, b, m, n = [left[i]], [right[j]], source[left[i]], target[right[j]]
        while m != n:
            if m < n:
                i += 1
                if i == len(left):
                    return results
                a.append(left[i])
                m *= source[left[i]]
            else:
                j += 1
                if j == len(right):
                    return results
                b.append(right[j])
                n *= target[right[j]]
        results.append((tuple(a), tuple(b)))
        i, j = i + 1, j + 1
    return results


def reshaped(
    source: Sequence[int], target: Sequence[int], dim: int, outer: int, parts: int
) -> tuple[int, int] | None:
    """The (dim, outer) in `target` of a dim of `source` that is viewed as [outer, parts, rest] and
    sharded over parts; None where no dim of `target` is sharded evenly by it.
    """
    group = next((g for g in groups(source, target) if dim in g[0]), None)
    if group is None:
        return None
    before = prod(source[d] for d in group[0] if d < dim) * outer
    for at in group[1]:
        ahead = prod(target[d] for d in group[1] if d < at)
        if before % ahead == 0 and target[at] % (before // ahead * parts) == 0:
            return at, before // ahead
    return None
