"""Prove a sharding rule by running the op: on full tensors and on two shards, and comparing.

Used by the tests on every built-in rule, and by `graphaccel.sharding_rule` on a user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from graphaccel.ir.values import op_of, tensors_of
from graphaccel.sharding.rules.notation import Indices, Notation, shape_of, tensor_arguments

aten = torch.ops.aten
# The first number of a list of sizes among an affine grid's arguments.
_LISTS_IMAGES: Mapping[Any, int] = {aten.affine_grid_generator.default: 1}
# The number of images among a group norm's arguments.
_COUNTS_IMAGES: Mapping[Any, int] = {
    aten.native_group_norm.default: 3,
    aten.native_group_norm_backward.default: 5,
}


def call_node(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    """A call on real tensors as a node: a placeholder per tensor, values in `meta["val"]`."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point() or value.any() or not value.dim():
            node = graph.placeholder(f"x{len(graph.nodes)}")
        else:  # so that a graph can tell that these are zeros
            node = graph.call_function(aten.zeros.default, (list(value.shape),))
        node.meta["val"] = value
        return node

    given: Any = map_aggregate((args, dict(kwargs)), placed)
    node = graph.call_function(target, *given)
    node.meta["val"] = computed(node, {})
    return node


def computed(
    node: fx.Node, tensors: Mapping[int, Tensor], shapes: Mapping[tuple, tuple] | None = None
) -> Any:
    """The result of the call with the tensors at some positions, and lists of sizes, replaced."""
    position = -1

    def value(x: Any) -> Any:
        nonlocal position
        if not isinstance(x, fx.Node):
            return x
        position += 1
        return tensors.get(position, x.meta["val"])

    given: Any = map_aggregate((node.args, dict(node.kwargs)), value)
    args: tuple[Any, ...] = given[0]
    if shapes:
        args = tuple(list(shapes.get(tuple(a), a)) if isinstance(a, list) else a for a in args)
        if (at := _COUNTS_IMAGES.get(node.target)) is not None:
            args = (*args[:at], args[at] // 2, *args[at + 1 :])
        if (at := _LISTS_IMAGES.get(node.target)) is not None:
            args = (*args[:at], [args[at][0] // 2, *args[at][1:]], *args[at + 1 :])
    return op_of(node)(*args, **given[1])


def faults(node: fx.Node, rule: Notation) -> Iterator[str]:
    """What is wrong with a rule on this call, a sentence each; nothing if the rule holds.

    Dims of odd size are not split: prove a rule on even ones.
    """
    tensors = tensor_arguments(node)
    if [len(names) for names in rule.inputs] != [len(shape_of(t)) for t in tensors]:
        yield "it names other dims than its tensors have"
        return
    if [len(n) for n in rule.outputs] != [w.dim() for w in tensors_of(node.meta["val"])]:
        yield "it names other dims than its results have"
        return
    yield from _shards(node, rule)
    yield from _linear(node, rule)
    yield from _unread(node, rule)


def _halves(value: Tensor, names: Indices, index: str) -> list[Tensor]:
    """The two shards of a tensor; the tensor twice if it does not have the index."""
    if index not in names:
        return [value, value]
    # Contiguous, as computed shards are: the kernel of layer norm's gradient requires it.
    return [half.contiguous() for half in value.chunk(2, names.index(index))]


def _is_continuous(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


_ROUNDING = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-1,
}


def _rounding(tensors: Iterable[Tensor]) -> float:
    """The tolerance for the coarsest of the floating-point dtypes."""
    return max((_ROUNDING.get(t.dtype, 1e-4) for t in tensors if _is_continuous(t)), default=0.0)


def _equal(got: Tensor, wanted: Tensor, read: Iterable[Tensor] = ()) -> bool:
    """Whether results agree up to rounding. read: operands, whose dtypes set the tolerance too."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not _is_continuous(got):
        return torch.equal(got, wanted)
    fine = _rounding((got, *read))
    return torch.allclose(got, wanted, rtol=fine, atol=fine, equal_nan=True)


def _shards(node: fx.Node, rule: Notation) -> Iterator[str]:
    """Check each index that may be sharded: results joined along it, or summed."""
    tensors = tensor_arguments(node)
    whole = tensors_of(node.meta["val"])
    every = {i for names in rule.inputs for i in names} - rule.whole - {"", "1"}
    for index in sorted(every):
        summed = [
            k for k, names in enumerate(rule.outputs) if index not in names and k not in rule.kept
        ]
        if summed and not rule.sums:
            continue  # a refusal is legal
        pairs = [(shape_of(t), n) for t, n in zip(tensors, rule.inputs, strict=True)]
        pairs += [(tuple(w.shape), n) for w, n in zip(whole, rule.outputs, strict=True)]
        if any(shape[n.index(index)] % 2 for shape, n in pairs if index in n):
            continue
        shards = [
            _halves(t.meta["val"], n, index) for t, n in zip(tensors, rule.inputs, strict=True)
        ]
        local = {
            tuple(w.shape): tuple(
                s // 2 if i == index else s for s, i in zip(w.shape, n, strict=True)
            )
            for w, n in zip(whole, rule.outputs, strict=True)
        }
        parts = [
            tensors_of(computed(node, {i: s[half] for i, s in enumerate(shards)}, local))
            for half in (0, 1)
        ]
        for k, names in enumerate(rule.outputs):
            left, right = parts[0][k], parts[1][k]
            if index in names:
                holds = _equal(torch.cat([left, right], names.index(index)), whole[k])
            elif k in rule.kept:
                holds = _equal(left, whole[k]) and _equal(right, whole[k])
            else:
                holds = _equal(left + right, whole[k])
            if not holds:
                yield f"sharding `{index}` changes result {k}"


def _linear(node: fx.Node, rule: Notation) -> Iterator[str]:
    """Check `linear`: results for two terms of the inputs must add up to that for their sum."""
    tensors = tensor_arguments(node)
    whole = tensors_of(node.meta["val"])
    for group in rule.linear:
        if not all(_is_continuous(tensors[i].meta["val"]) for i in group):
            continue
        first = {i: torch.randn_like(tensors[i].meta["val"]) for i in group}
        second = {i: tensors[i].meta["val"] - first[i] for i in group}
        parts = [tensors_of(computed(node, half)) for half in (first, second)]
        read = [tensors[i].meta["val"] for i in group]
        for k, wanted in enumerate(whole):
            if k in rule.kept:
                if not all(_equal(part[k], wanted) for part in parts):
                    yield f"result {k} depends on inputs {sorted(group)}"
            elif not _equal(parts[0][k] + parts[1][k], wanted, read):
                yield f"result {k} is not linear in inputs {sorted(group)}"


def _unread(node: fx.Node, rule: Notation) -> Iterator[str]:
    tensors = tensor_arguments(node)
    other = {i: torch.randn_like(tensors[i].meta["val"]) for i in rule.unread}
    got, wanted = tensors_of(computed(node, other)), tensors_of(node.meta["val"])
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if not _equal(a, b):
            yield f"result {k} depends on an input that the rule says is not read"
