"""The rule of every ATen op that occurs in captured training steps.

`rule_of(node)` gives the node's `Notation`, or None where no rule is known: callers then refuse a
sharded operand and say which op it was. Elementwise ops need no entry: they carry torch's pointwise tag.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphaccel.rules.notation import (
    Notation,
    broadcast,
    einsum,
    output_shapes,
    regrouped,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
Rule = Callable[[fx.Node], Notation]


def rule_of(node: fx.Node) -> Notation | None:
    """The rule of a call, or None."""
    found = _RULES.get(node.target)
    if found is not None:
        return found(node)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return broadcast(node)
    return None


def _text(text: str, *, whole: str = "", linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    return lambda node: einsum(text, node, whole=whole.split(), linear=linear)


def _linear_in(*groups: tuple[int, ...]) -> Rule:
    return lambda node: broadcast(node, linear=groups)


def _times(node: fx.Node) -> Notation:
    """mul: linear in each factor alone."""
    return broadcast(node, linear=[(i,) for i in range(len(tensor_arguments(node)))])


def _plus(node: fx.Node) -> Notation:
    """add, sub: linear in both together; adding a number is not linear."""
    count = len(tensor_arguments(node))
    return broadcast(node, linear=[(0, 1)] if count == 2 else [])


def _reshape(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    left, right = regrouped(shape_of(source), output_shapes(node)[0])
    return Notation((left,), (right,), linear=(frozenset({0}),))


def _names(count: int) -> tuple[str, ...]:
    return tuple(f".{k}" for k in range(count))


def _same(node: fx.Node) -> Notation:
    """One tensor in, one out, dims as they are, linear."""
    (source,) = tensor_arguments(node)
    names = _names(len(shape_of(source)))
    return Notation((names,), (names,), linear=(frozenset({0}),))


def _along(dim_at: int, *, default: int | None = None, linear: bool = False, drops: bool = False) -> Rule:
    """Ops that act along one dim (argument number `dim_at`), which must stay whole."""

    def rule(node: fx.Node) -> Notation:
        tensors = tensor_arguments(node)
        rank = len(shape_of(tensors[0]))
        dim = node.args[dim_at] if len(node.args) > dim_at else node.kwargs.get("dim", default)
        names = list(_names(rank))
        whole = names[int(dim) % rank] if rank and dim is not None else ""
        kept = tuple(n for n in names if not (drops and n == whole))
        outputs = tuple(kept for _ in output_shapes(node))
        inputs = tuple(tuple(names) for _ in tensors)
        groups = (frozenset(range(len(tensors))),) if linear else ()
        return Notation(inputs, outputs, frozenset({whole} if whole else ()), groups, sums=False)

    return rule


def _reduce(*, linear: bool) -> Rule:
    """Reductions: a dim that goes becomes a partial sum where the reduction is a sum."""

    def rule(node: fx.Node) -> Notation:
        (source,) = tensor_arguments(node)
        rank = len(shape_of(source))
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if dims is None or dims == []:
            dims = range(rank)
        gone = {d % rank for d in ([dims] if isinstance(dims, int) else dims)} if rank else set()
        keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        names = _names(rank)
        out = tuple("1" if i in gone else n for i, n in enumerate(names) if keep or i not in gone)
        groups = (frozenset({0}),) if linear else ()
        return Notation((names,), tuple(out for _ in output_shapes(node)), linear=groups, sums=linear)

    return rule


def _mean(node: fx.Node) -> Notation:
    """An average stays one only over whole dims (canonical form has sums where the batch is averaged)."""
    found = _reduce(linear=True)(node)
    gone = set(found.inputs[0]) - set(found.outputs[0])
    return Notation(found.inputs, found.outputs, frozenset(gone), found.linear, sums=False)


def _permute(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    names = _names(len(shape_of(source)))
    if node.target is aten.permute.default:
        order = [d % len(names) for d in node.args[1]]
    else:
        order = list(range(len(names)))
        if node.target is aten.t.default:
            order.reverse()
        else:
            a, b = node.args[1] % len(names), node.args[2] % len(names)
            order[a], order[b] = order[b], order[a]
    return Notation((names,), (tuple(names[d] for d in order),), linear=(frozenset({0}),))


def _expand(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    shape, (out,) = shape_of(source), output_shapes(node)
    names = _names(len(out))
    tail = names[len(names) - len(shape) :]
    grown = tuple("1" if n == 1 and out[len(out) - len(shape) + i] != 1 else tail[i] for i, n in enumerate(shape))
    return Notation((grown,), (names,), linear=(frozenset({0}),))


def _slice(node: fx.Node) -> Notation:
    """A slice that takes everything leaves its dim shardable."""
    tensors = tensor_arguments(node)
    names = _names(len(shape_of(tensors[0])))
    taken = shape_of(tensors[0]) == output_shapes(node)[0] and len(tensors) == 1
    dim = node.args[1] if len(node.args) > 1 else 0
    whole = frozenset() if taken else frozenset({names[dim % len(names)]})
    return Notation(tuple(names for _ in tensors), (names,), whole, (frozenset(range(len(tensors))),))


def _scatter_slice(dim_at: int) -> Rule:
    """slice_scatter, select_scatter: the dim written along stays whole; linear in both tensors."""

    def rule(node: fx.Node) -> Notation:
        base, source = tensor_arguments(node)
        names = _names(len(shape_of(base)))
        dim = (node.args[dim_at] if len(node.args) > dim_at else 0) % len(names)
        inner = names if len(shape_of(source)) == len(names) else names[:dim] + names[dim + 1 :]
        return Notation((names, inner), (names,), frozenset({names[dim]}), (frozenset({0, 1}),))

    return rule


def _slice_backward(dim_at: int, *, dropped: bool) -> Rule:
    """slice_backward, select_backward: a gradient put back where it was taken from."""

    def rule(node: fx.Node) -> Notation:
        (out,) = output_shapes(node)
        names = _names(len(out))
        dim = node.args[dim_at] % len(names)
        inner = names[:dim] + names[dim + 1 :] if dropped else names
        source = shape_of(tensor_arguments(node)[0])
        whole = frozenset() if source == out else frozenset({names[dim]})
        return Notation((inner,), (names,), whole, (frozenset({0}),))

    return rule


def _squeeze(node: fx.Node) -> Notation:
    return _reshape(node)


def _concatenate(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    rank = len(shape_of(tensors[0]))
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    names = _names(rank)
    group = (frozenset(range(len(tensors))),)
    return Notation(tuple(names for _ in tensors), (names,), frozenset({names[dim]}), group)


def _pad(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    names = _names(len(shape_of(source)))
    padding = node.args[1]
    touched = {names[-1 - i // 2] for i, n in enumerate(padding) if n != 0}
    value = node.args[2] if len(node.args) > 2 else 0
    linear = (frozenset({0}),) if value == 0 else ()
    return Notation((names,), (names,), frozenset(touched), linear)


def _roll(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    names = _names(len(shape_of(source)))
    dims = node.args[2] if len(node.args) > 2 and node.args[2] else range(len(names))
    return Notation((names,), (names,), frozenset(names[d % len(names)] for d in dims), (frozenset({0}),))


def _embedding_backward(node: fx.Node) -> Notation:
    gradient, indices = tensor_arguments(node)
    names = _names(len(shape_of(indices)))
    return Notation(((*names, "h"), names), (("", "h"),), linear=(frozenset({0}),))


def _convolution(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    spatial = [f"i{k}" for k in range(len(shape_of(tensors[0])) - 2)]
    out = [f"o{k}" for k in range(len(spatial))]
    inputs: list[tuple[str, ...]] = [("n", "c", *spatial), ("f", "", *[""] * len(spatial))]
    inputs += [("f",)] * (len(tensors) - 2)
    whole = frozenset({"c", "f", *spatial, *out})
    return Notation(tuple(inputs), (("n", "f", *out),), whole, (frozenset({0}),) if len(inputs) == 2 else ())


def _convolution_backward(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    spatial = [""] * (len(shape_of(tensors[0])) - 2)
    out: list[tuple[str, ...]] = []
    for wanted, names in zip(
        node.args[10], (("n", "c", *spatial), ("f", "", *spatial), ("f",)), strict=True
    ):
        if wanted:
            out.append(names)
    inputs = (("n", "f", *spatial), ("n", "c", *spatial), ("f", "", *spatial))
    return Notation(inputs, tuple(out), frozenset({"c", "f"}), (frozenset({0}),))


def _layer_norm(node: fx.Node) -> Notation:
    """native_layer_norm: examples are independent, the normalised dims whole."""
    tensors = tensor_arguments(node)
    rank, inner = len(shape_of(tensors[0])), len(node.args[1])
    outer, normal = _names(rank - inner), tuple(f"d{k}" for k in range(inner))
    statistics = (*outer, *("1",) * inner)
    inputs = ((*outer, *normal), *(normal for _ in tensors[1:]))
    return Notation(inputs, ((*outer, *normal), statistics, statistics), frozenset(normal), sums=False)


def _layer_norm_backward(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    rank, inner = len(shape_of(tensors[0])), len(node.args[2])
    outer, normal = _names(rank - inner), tuple(f"d{k}" for k in range(inner))
    full = (*outer, *normal)
    inputs = [full, full, (*outer, *("1",) * inner), (*outer, *("1",) * inner)]
    inputs += [normal for _ in tensors[4:]]
    wanted = [names for names, on in zip((full, normal, normal), node.args[7], strict=True) if on]
    return Notation(tuple(inputs), tuple(wanted), frozenset(normal), (frozenset({0}),))


def _group_norm(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    x = ("n", "c", *[""] * (len(shape_of(tensors[0])) - 2))
    inputs = (x, *(("c",) for _ in tensors[1:]))
    return Notation(inputs, (x, ("n", ""), ("n", "")), frozenset({"c"}), sums=False)


def _group_norm_backward(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    x = ("n", "c", *[""] * (len(shape_of(tensors[0])) - 2))
    inputs = [x, x, ("n", ""), ("n", ""), *(("c",) for _ in tensors[4:])]
    wanted = [names for names, on in zip((x, ("c",), ("c",)), node.args[9], strict=True) if on]
    return Notation(tuple(inputs), tuple(wanted), frozenset({"c"}), (frozenset({0}),))


def _batch_norm(node: fx.Node) -> Notation:
    """Batch statistics mix the examples: no dim of the input may be sharded but the channels."""
    tensors = tensor_arguments(node)
    x = ("n", "c", *[f"i{k}" for k in range(len(shape_of(tensors[0])) - 2)])
    inputs = tuple(x if len(shape_of(t)) > 1 else ("c",) for t in tensors)
    outputs = tuple(x if len(s) > 1 else ("c",) for s in output_shapes(node))
    return Notation(inputs, outputs, frozenset(x) - {"c"}, sums=False)


def _attention(node: fx.Node) -> Notation:
    """scaled_dot_product_attention on [b, h, s, d]; a mask is broadcast. (logsumexp is [b, h, s].)"""
    tensors = tensor_arguments(node)
    inputs = [("b", "h", "q", "d"), ("b", "k", "s", "d"), ("b", "k", "s", "e")]
    for mask in tensors[3:]:
        shape = shape_of(mask)
        full = ("b", "h", "q", "s")[4 - len(shape) :]
        inputs.append(tuple("1" if n == 1 else full[i] for i, n in enumerate(shape)))
    outputs = [("b", "h", "q", "e"), ("b", "h", "q")][: len(output_shapes(node))]
    return Notation(tuple(inputs), tuple(outputs), frozenset("h k q s d e".split()), sums=False)


def _attention_backward(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    q, k, v = ("b", "h", "q", "d"), ("b", "k", "s", "d"), ("b", "k", "s", "e")
    o = ("b", "h", "q", "e")
    inputs = [o, q, k, v, o, ("b", "h", "q")]
    for mask in tensors[6:]:
        shape = shape_of(mask)
        full = ("b", "h", "q", "s")[4 - len(shape) :]
        inputs.append(tuple("1" if n == 1 else full[i] for i, n in enumerate(shape)))
    return Notation(tuple(inputs), (q, k, v), frozenset("h k q s d e".split()), (frozenset({0}),))


def _index(node: fx.Node) -> Notation:
    """`x[i]`, `x[:, i]`, `x[rows, columns]`: indexed dims of x stay whole, the others follow.

    Where an index array counts the rows themselves (`x[arange(b), last]`), row r of the result needs
    row r of x only: that dim of x then lies with the index's own first dim.
    """
    source, *_ = tensor_arguments(node)
    positions = node.args[1]
    shape = shape_of(source)
    used = [i for i, n in enumerate(positions) if isinstance(n, fx.Node)]
    arrays = [positions[i] for i in used]
    width = max((len(shape_of(a)) for a in arrays), default=0)
    joint = tuple(f"j{k}" for k in range(width))
    names = [f".{k}" for k in range(len(shape))]
    whole = {names[i] for i in used}
    for i in used:
        if _counts_rows(positions[i], shape[i]) and i == used[0]:
            at = [k for k, n in enumerate(shape_of(positions[i])) if n == shape[i]]
            if at:
                whole.discard(names[i])
                names[i] = joint[width - len(shape_of(positions[i])) + at[0]]
    inputs = [tuple(names)]
    for array in arrays:
        s = shape_of(array)
        tail = joint[width - len(s) :]
        inputs.append(tuple("1" if n == 1 and width and output_shapes(node) else tail[k] for k, n in enumerate(s)))
    contiguous = used == list(range(used[0], used[-1] + 1)) if used else True
    rest = [n for i, n in enumerate(names) if i not in used]
    at = used[0] if used and contiguous else 0
    out = (*rest[:at], *joint, *rest[at:])
    return Notation(tuple(inputs), (out,), frozenset(whole), (frozenset({0}),), sums=False)


def _counts_rows(node: fx.Node, size: int) -> bool:
    """Whether a node is `arange(size)`, perhaps reshaped."""
    while node.target in (aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.reshape.default):
        node = node.args[0]
    return node.target in (aten.arange.default, aten.arange.start) and shape_of(node) == (size,)


def _index_put(node: fx.Node) -> Notation:
    """The gradient of indexing: added into zeros. Batched indices that are summed give partial sums."""
    base, *rest = tensor_arguments(node)
    *arrays, values = rest
    positions = node.args[1]
    shape = shape_of(base)
    used = [i for i, n in enumerate(positions) if isinstance(n, fx.Node)]
    width = max(len(shape_of(a)) for a in arrays)
    joint = tuple(f"j{k}" for k in range(width))
    names = [f".{k}" for k in range(len(shape))]
    whole: set[str] = set()
    for i in used:
        name = names[i]
        if i == used[0] and _counts_rows(positions[i], shape[i]):
            names[i] = joint[0]
        else:
            whole.add(name)
    inputs = [tuple(names)]
    for array in arrays:
        s = shape_of(array)
        tail = joint[width - len(s) :]
        inputs.append(tuple("1" if n == 1 else tail[k] for k, n in enumerate(s)))
    kept = [n for i, n in enumerate(names) if i not in used]
    at = used[0]
    full = (*kept[:at], *joint, *kept[at:])
    tail = full[len(full) - len(shape_of(values)) :]
    inputs.append(tail)
    last = len(inputs) - 1
    return Notation(tuple(inputs), (tuple(names),), frozenset(whole), (frozenset({0, last}),))


def _flip(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    names = _names(len(shape_of(source)))
    return Notation((names,), (names,), frozenset(names[d % len(names)] for d in node.args[1]), (frozenset({0}),))


def _gather(node: fx.Node) -> Notation:
    source, _ = tensor_arguments(node)
    names = _names(len(shape_of(source)))
    whole = names[node.args[1] % len(names)] if names else ""
    return Notation((names, names), (names,), frozenset({whole}), (frozenset({0}),), sums=False)


def _scatter_add(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    names = _names(len(shape_of(tensors[0])))
    whole = frozenset({names[node.args[1] % len(names)]})
    return Notation(tuple(names for _ in tensors), (names,), whole, (frozenset({0, 2}),))


def _labelled_loss(node: fx.Node) -> Notation:
    """nll_loss_forward with reduction=sum: [n, c] scores and [n] labels give a partial sum."""
    tensors = tensor_arguments(node)
    scores = ("n", "c") if len(shape_of(tensors[0])) == 2 else ("c",)
    inputs = [scores, scores[:-1], *(("c",) for _ in tensors[2:])]
    reduced = node.args[3] != 0
    out = () if reduced else scores[:-1]
    return Notation(tuple(inputs), (out, ()), frozenset({"c"}), (frozenset({0}),))


def _labelled_loss_2d(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    spatial = ("y", "x")
    inputs = [("n", "c", *spatial), ("n", *spatial), *(("c",) for _ in tensors[2:])]
    out = () if node.args[3] != 0 else ("n", *spatial)
    return Notation(tuple(inputs), (out, ()), frozenset({"c"}), (frozenset({0}),))


def _labelled_loss_backward(node: fx.Node) -> Notation:
    """The incoming gradient is one number; the total weight is read only by a mean."""
    tensors = tensor_arguments(node)
    rank = len(shape_of(tensors[1]))
    scores = ("n", "c", "y", "x")[:rank] if rank > 1 else ("c",)
    labels = tuple(i for i in scores if i != "c")
    gradient = () if node.args[4] != 0 else labels
    inputs = [gradient, scores, labels, *(("c",) for _ in tensors[3:-1]), ()]
    unread = frozenset({len(inputs) - 1}) if node.args[4] != 1 else frozenset()
    return Notation(tuple(inputs), (scores,), frozenset({"c"}), (frozenset({0}),), unread=unread)


def _pool(node: fx.Node) -> Notation:
    """Pooling and its backward, upsampling: images are independent."""
    tensors = tensor_arguments(node)
    every = tuple(("n", "c", *[""] * (len(shape_of(t)) - 2)) for t in tensors)
    out = tuple(("n", "c", *[""] * (len(s) - 2)) for s in output_shapes(node))
    return Notation(every, out, frozenset({"c"}), sums=False)


def _factory(node: fx.Node) -> Notation:
    """Tensors made of numbers: every part is made where it is used."""
    outputs = tuple(tuple("" for _ in s) for s in output_shapes(node))
    inputs = tuple(tuple("" for _ in shape_of(t)) for t in tensor_arguments(node))
    return Notation(inputs, outputs, unread=frozenset(range(len(inputs))))


def _dropout(node: fx.Node) -> Notation:
    (source,) = tensor_arguments(node)
    names = _names(len(shape_of(source)))
    return Notation((names,), (names, names))


def _softmax_backward(dim_at: int) -> Rule:
    def rule(node: fx.Node) -> Notation:
        names = _names(len(output_shapes(node)[0]))
        whole = frozenset({names[node.args[dim_at] % len(names)]}) if names else frozenset()
        return Notation((names, names), (names,), whole, (frozenset({0}),), sums=False)

    return rule


def _where(node: fx.Node) -> Notation:
    """where(condition, a, b): linear in the two branches together."""
    count = len(tensor_arguments(node))
    return broadcast(node, linear=[(1, 2)] if count == 3 else [])


def _weight_norm(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    inputs = tuple(tuple("" for _ in shape_of(t)) for t in tensors)
    return Notation(inputs, tuple(tuple("" for _ in s) for s in output_shapes(node)), sums=False)


def _weight_norm_backward(node: fx.Node) -> Notation:
    found = _weight_norm(node)
    return Notation(found.inputs, found.outputs, linear=(frozenset({0}),), sums=False)


_FIRST = _linear_in((0,))
_RULES: MappingProxyType[Any, Rule] = MappingProxyType(
    {
        # elementwise ops through which partial sums pass
        aten.add.Tensor: _plus,
        aten.sub.Tensor: _plus,
        aten.mul.Tensor: _times,
        aten.mul.Scalar: _FIRST,
        aten.div.Tensor: _FIRST,
        aten.div.Scalar: _FIRST,
        aten.neg.default: _FIRST,
        aten._to_copy.default: _same,
        aten.clone.default: _same,
        aten.detach.default: _same,
        aten.where.self: _where,
        aten.masked_fill.Scalar: broadcast,
        aten.tanh_backward.default: _FIRST,
        aten.gelu_backward.default: _FIRST,
        aten.silu_backward.default: _FIRST,
        aten.sigmoid_backward.default: _FIRST,
        aten.threshold_backward.default: _FIRST,
        aten.native_dropout_backward.default: _FIRST,
        aten.native_dropout.default: _dropout,
        aten.copy.default: lambda node: broadcast(node, linear=[(1,)]),
        aten.fill.Tensor: broadcast,
        # products
        aten.mm.default: _text("m k, k n -> m n", linear=((0,), (1,))),
        aten.bmm.default: _text("b m k, b k n -> b m n", linear=((0,), (1,))),
        aten.addmm.default: lambda node: einsum(
            "n, m k, k n -> m n" if len(shape_of(tensor_arguments(node)[0])) == 1 else "m n, m k, k n -> m n",
            node,
            whole=("k",),
        ),
        aten.baddbmm.default: _text("b m n, b m k, b k n -> b m n", whole="k"),
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
        # shapes
        aten.view.default: _reshape,
        aten._unsafe_view.default: _reshape,
        aten.reshape.default: _reshape,
        aten.unsqueeze.default: _reshape,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.squeeze.default: _squeeze,
        aten.t.default: _permute,
        aten.transpose.int: _permute,
        aten.permute.default: _permute,
        aten.expand.default: _expand,
        aten.slice.Tensor: _slice,
        aten.select.int: _along(1, linear=True, drops=True),
        aten.split.Tensor: _along(2, default=0, linear=True),
        aten.split_with_sizes.default: _along(2, default=0, linear=True),
        aten.unbind.int: _along(1, default=0, linear=True, drops=True),
        aten.cat.default: _concatenate,
        aten.slice_backward.default: _slice_backward(2, dropped=False),
        aten.select_backward.default: _slice_backward(2, dropped=True),
        aten.slice_scatter.default: _scatter_slice(2),
        aten.select_scatter.default: _scatter_slice(2),
        aten.constant_pad_nd.default: _pad,
        aten.roll.default: _roll,
        aten.flip.default: _flip,
        # along one dim
        aten._softmax.default: _along(1),
        aten._safe_softmax.default: _along(1),
        aten._log_softmax.default: _along(1),
        aten._softmax_backward_data.default: _softmax_backward(2),
        aten._log_softmax_backward_data.default: _softmax_backward(2),
        aten.cumsum.default: _along(1, linear=True),
        aten.sort.default: _along(1, default=-1),
        aten.topk.default: _along(2, default=-1),
        aten.argmax.default: _reduce(linear=False),
        aten.gather.default: _gather,
        aten.scatter_add.default: _scatter_add,
        # reductions
        aten.sum.default: _reduce(linear=True),
        aten.sum.dim_IntList: _reduce(linear=True),
        aten.mean.dim: _mean,
        aten.mean.default: _mean,
        aten.amax.default: _reduce(linear=False),
        aten.amin.default: _reduce(linear=False),
        aten.max.default: _reduce(linear=False),
        aten.min.default: _reduce(linear=False),
        aten.any.default: _reduce(linear=False),
        aten.any.dim: _reduce(linear=False),
        aten.all.default: _reduce(linear=False),
        aten.linalg_vector_norm.default: _reduce(linear=False),
        # look-ups
        aten.embedding.default: lambda node: Notation(
            (("v", "h"), _names(len(shape_of(tensor_arguments(node)[1])))),
            ((*_names(len(shape_of(tensor_arguments(node)[1]))), "h"),),
            frozenset({"v"}),
        ),
        aten.embedding_dense_backward.default: _embedding_backward,
        aten.index.Tensor: _index,
        aten.index_put.default: _index_put,
        aten.index_select.default: _along(1, default=0, linear=True),
        # normalisation
        aten.native_layer_norm.default: _layer_norm,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_backward,
        aten._native_batch_norm_legit_functional.default: _batch_norm,
        aten.native_batch_norm_backward.default: _batch_norm,
        aten._weight_norm_interface.default: _weight_norm,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        # attention
        aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
        # losses
        aten.nll_loss_forward.default: _labelled_loss,
        aten.nll_loss_backward.default: _labelled_loss_backward,
        aten.nll_loss2d_forward.default: _labelled_loss_2d,
        aten.nll_loss2d_backward.default: _labelled_loss_backward,
        # images
        aten.max_pool2d_with_indices.default: _pool,
        aten.max_pool2d_with_indices_backward.default: _pool,
        aten.avg_pool2d.default: _pool,
        aten.avg_pool2d_backward.default: _pool,
        aten._adaptive_avg_pool2d.default: _pool,
        aten._adaptive_avg_pool2d_backward.default: _pool,
        aten.upsample_bilinear2d.default: _pool,
        aten.upsample_nearest2d.default: _pool,
        # made of numbers
        aten.arange.default: _factory,
        aten.arange.start: _factory,
        aten.full.default: _factory,
        aten.zeros.default: _factory,
        aten.ones.default: _factory,
        aten.empty.memory_format: _factory,
        aten.scalar_tensor.default: _factory,
        aten.new_zeros.default: _factory,
        aten.new_ones.default: _factory,
        aten.new_full.default: _factory,
        aten.new_empty.default: _factory,
        aten.ones_like.default: _factory,
        aten.zeros_like.default: _factory,
        aten.full_like.default: _factory,
        aten.empty_like.default: _factory,
        aten.rand.default: _factory,
        aten.randn.default: _factory,
    }
)
