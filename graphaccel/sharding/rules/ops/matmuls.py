"""Sharding rules of matmuls and convolutions."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.kernels.ops.experts import GRADIENT, GROUPED_MATMUL
from graphaccel.sharding.rules.notation import (
    Indices,
    Notation,
    Rule,
    Rules,
    output_shapes,
    shape_of,
    tensor_arguments,
    text,
)

aten = torch.ops.aten


def _added_matmul(node: fx.Node) -> Notation:
    """addmm, baddbmm: the added term is broadcast. It may be added only once, so k cannot be
    sharded."""
    added, *_ = tensor_arguments(node)
    (out,) = output_shapes(node)
    names: Indices = ("b", "m", "n")[3 - len(out) :]
    batch = names[:-2]
    shape = shape_of(added)
    tail, sizes = names[len(out) - len(shape) :], out[len(out) - len(shape) :]
    bias = tuple(
        "1" if n == 1 and size != 1 else i for n, size, i in zip(shape, sizes, tail, strict=True)
    )
    return Notation(
        (bias, (*batch, "m", "k"), (*batch, "k", "n")),
        (names,),
        frozenset({"k"}),
        (frozenset({0, 1}), frozenset({0, 2})),
    )


def _added_to(added: str, factors: str) -> Rule:
    """addmv, addr, addbmm: the added term is broadcast and added once, so summed dims are not
    sharded."""

    def rule(node: fx.Node) -> Notation:
        left, right = (tuple(f.split()) for f in factors.split(","))
        out = tuple(added.split())
        (shape,), own = output_shapes(node), shape_of(tensor_arguments(node)[0])
        tail = len(out) - len(own)
        bias = tuple(
            "1" if n == 1 and shape[tail + k] != 1 else out[tail + k] for k, n in enumerate(own)
        )
        whole = frozenset({*left, *right} - set(out))
        groups = (frozenset({0, 1}), frozenset({0, 2}))
        return Notation((bias, left, right), (out,), whole, groups)

    return rule


def _convolution(node: fx.Node) -> Notation:
    """[n, c, ...] with [f, c/groups, ...]: a contraction over c, except with channel groups. A bias
    may be added only once, so c cannot be sharded beside one."""
    tensors = tensor_arguments(node)
    spatial = [""] * (len(shape_of(tensors[0])) - 2)
    inputs: list[Indices] = [("n", "c", *spatial), _filter(node, spatial)]
    inputs += [("f",)] * (len(tensors) - 2)
    linear = (frozenset({0}), frozenset({1})) if len(inputs) == 2 else ()
    whole = _grouped(node) | (set() if len(inputs) == 2 else {"c"})
    return Notation(tuple(inputs), (("n", "f", *spatial),), frozenset(whole), linear)


def _grouped(node: fx.Node) -> set[str]:
    return set() if arguments(node)["groups"] == 1 else {"c", "f"}


def _filter(node: fx.Node, spatial: list[str]) -> Indices:
    """Dims of a convolution's weight: [c, f, ...] if it is transposed."""
    if arguments(node)["groups"] != 1:
        return ("", "", *spatial)
    return ("c", "f", *spatial) if arguments(node)["transposed"] else ("f", "c", *spatial)


def _convolution_backward(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    spatial = [""] * (len(shape_of(tensors[0])) - 2)
    image, weight, bias = ("n", "c", *spatial), _filter(node, spatial), ("f",)
    wanted = arguments(node)["output_mask"]
    outputs = [names for names, on in zip((image, weight, bias), wanted, strict=True) if on]
    inputs = (("n", "f", *spatial), image, weight)
    whole = _grouped(node) | ({"c"} if wanted[2] else set())  # no c in the gradient of the bias
    return Notation(inputs, tuple(outputs), frozenset(whole), (frozenset({0}),))


def _chosen(node: fx.Node) -> Notation:
    """Rows multiplied by the weights of their experts. Sharding the experts needs more than smaller
    arguments (`sharding.rules.strategies`)."""
    weight: Indices = ("e", "n", "k") if arguments(node)["transposed"] else ("e", "k", "n")
    linear = (frozenset({0}), frozenset({1}))
    return Notation((("s", "k"), weight, ("s",)), (("s", "n"),), frozenset({"e"}), linear)


RULES: Rules = MappingProxyType(
    {
        aten.mm.default: text("m k, k n -> m n", linear=((0,), (1,))),
        aten.bmm.default: text("b m k, b k n -> b m n", linear=((0,), (1,))),
        aten.mv.default: text("m k, k -> m", linear=((0,), (1,))),
        aten.dot.default: text("k, k ->", linear=((0,), (1,))),
        aten.addmm.default: _added_matmul,
        aten.vdot.default: text("k, k ->", linear=((0,), (1,))),
        aten.addmv.default: _added_to("m", "m k, k"),
        aten.addr.default: _added_to("m n", "m, n"),
        aten.addbmm.default: _added_to("m n", "b m k, b k n"),
        aten.baddbmm.default: _added_matmul,
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
        GROUPED_MATMUL: _chosen,
        GRADIENT: text("s k, s n, s -> e k n", linear=((0,), (1,))),
    }
)
