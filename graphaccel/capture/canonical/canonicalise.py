"""Canonicalise a forward graph: one form per computation, for fusion and sharding rules.

before                                               after
  %y: f32[8,4] = aten.native_dropout(%x, 0.0, True)    (uses %x)
  %v: f32[6,4,2] = aten.index(%w, [%e])                %y: f32[6,4] = expert_product(%x, %w, %e)
  %y: f32[6,4,1] = aten.bmm(%v, aten.unsqueeze(%x, -1))

Means and losses: `capture.canonical.losses`. Strided views: `capture.canonical.strided`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphaccel.capture.canonical.calls import arguments_of, emit, replace_call
from graphaccel.capture.canonical.causal import causal_attention
from graphaccel.capture.canonical.losses import LOSSES
from graphaccel.capture.canonical.strided import strided_read, strided_write
from graphaccel.ir.values import operands
from graphaccel.kernels.ops.experts import GROUPED_MATMUL

aten = torch.ops.aten


def canonicalise(graph: fx.GraphModule) -> None:
    """Rewrite `graph`, a functional forward graph with `meta["val"]` on every node, in place."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _REMOVED:
            replace_call(node, node.args[0])
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            # Whether a view is legal depends on the strides that kernels return; a reshape always
            # is.
            node.target = aten.reshape.default
        elif node.target is aten.squeeze.default:
            # Which dims have size one must not depend on the size of a part of the batch.
            node.target = aten.squeeze.dims
            sizes = node.args[0].meta["val"].shape
            node.args = (node.args[0], [d for d, n in enumerate(sizes) if n == 1])
        elif node.target in _CHECKS and not node.users:
            graph.graph.erase_node(node)
        elif (rewrite := _REWRITES.get(node.target)) is not None:
            rewrite(node)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()


def _linear(node: fx.Node) -> None:
    """A matmul with a transposed parameter becomes `linear`."""
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if right.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return
    weight = right.args[0]
    assert isinstance(weight, fx.Node)
    if weight.op != "placeholder" or weight.meta["val"].dim() != 2 or left.meta["val"].dim() < 2:
        return
    turned, value = weight.meta["val"].t(), right.meta["val"]
    if (turned.shape, turned.stride()) == (value.shape, value.stride()):
        replace_call(node, emit(node, aten.linear.default, left, weight))


def _broadcast(node: fx.Node) -> None:
    """Tensors of one shape, with which torch's losses begin, are no call where they have it."""
    given: Any = node.args[0]
    for user in list(node.users):
        tensor, shape = given[user.args[1]], user.meta["val"].shape
        same = tensor.meta["val"].shape == shape
        replace_call(user, tensor if same else emit(user, aten.expand.default, tensor, [*shape]))


def _dropout(node: fx.Node) -> None:
    """Dropout with p = 0, or outside training, is its input."""
    source, p, train = node.args
    if p != 0.0 and train is not False:
        return
    for user in list(node.users):
        if user.args[1] == 0:
            replace_call(user, source)
        elif user.users:
            return  # the mask has a reader
        else:
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _concatenate(node: fx.Node) -> None:
    """Legacy empty tensors of shape (0,) in a concatenation (initial caches) are dropped."""
    parts: Any = node.args[0]
    tensors = [t for t in parts if tuple(t.meta["val"].shape) != (0,)]
    if len(tensors) == 1:
        replace_call(node, tensors[0])
    elif len(tensors) < len(parts):
        node.args = (tensors, *node.args[1:])


def _repeat(node: fx.Node) -> None:
    """`x[N].repeat(3)` becomes an expand of `x[1, N]` to `[3, N]`, of which both dims are merged:
    for these there are rules where N is the batch, or part of it. Every dim is treated alike, so
    that captures at other sizes have the same calls."""
    source, times = node.args
    assert isinstance(source, fx.Node)
    counts: Any = times
    old, new = source.meta["val"].shape, node.meta["val"].shape
    if not counts or 0 in new:
        return
    sizes = [*[1] * (len(counts) - len(old)), *old]
    apart = [n for size in sizes for n in (1, size)]
    grown = [n for size, count in zip(sizes, counts, strict=True) for n in (count, size)]
    source = emit(node, aten.reshape.default, source, apart)
    source = emit(node, aten.expand.default, source, grown)
    replace_call(node, emit(node, aten.reshape.default, source, [*new]))


def _slice_write(node: fx.Node) -> None:
    """The value of a write into a slice (`x[:, 0] = y`): `copy` has no derivative of its own, so it
    becomes the source, in the dtype and shape of the destination."""
    into, source = node.args[:2]
    assert isinstance(into, fx.Node)
    assert isinstance(source, fx.Node)
    old, new = into.meta["val"], source.meta["val"]
    if new.dtype != old.dtype:
        source = emit(node, aten._to_copy.default, source, dtype=old.dtype)
    if new.shape != old.shape:
        source = emit(node, aten.expand.default, source, list(old.shape))
    replace_call(node, source)


def _masked_write(node: fx.Node) -> None:
    """The same number or row written where a mask is true (`x[x > 1] = 3`, `rows[mask] = row`)
    becomes an elementwise `where`: the shape of neither it nor its gradient depends on the mask."""
    passed = arguments_of(node)
    into, indices, value = passed["self"], passed["indices"], passed["values"]
    if passed["accumulate"] or len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return
    (mask,) = indices
    selected, written = mask.meta["val"], value.meta["val"]
    old = into.meta["val"]
    if selected.dtype != torch.bool or written.dtype != old.dtype:
        return
    row = old.dim() - selected.dim()  # dims of what one place of the mask selects
    first, kept = written.shape[: max(0, written.dim() - row)], written.shape[written.dim() - row :]
    if any(not _is_one(size) for size in first):
        return
    for _ in range(row):
        mask = emit(node, aten.unsqueeze.default, mask, -1)
    value = emit(node, aten.reshape.default, value, list(kept)) if first else value
    replace_call(node, emit(node, aten.where.self, mask, value, into))


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _expert_matmul(node: fx.Node) -> None:
    """A matmul with a weight looked up for every row (Hugging Face's `batched_mm`):
    expert_product."""
    left, right = operands(node)
    for weights, rows, transposed in ((left, right, True), (right, left, False)):
        dim = 2 if transposed else 1
        if not _is_matrix_per_row(weights) or rows.meta["val"].shape[dim] != 1:
            continue
        table, (experts,) = operands(weights)[0], operands(weights)[1]
        count = table.meta["val"].shape[0]
        unsqueezed = rows.target is aten.unsqueeze.default and operands(rows)[1] % 3 == dim
        flat = operands(rows)[0] if unsqueezed else emit(node, aten.squeeze.dim, rows, dim)
        result = emit(node, GROUPED_MATMUL, flat, table, experts, 0, count, transposed)
        for user in node.users:
            one = user.target is aten.squeeze.dim
            if one and operands(user)[1] % 3 == (2 if transposed else 1):
                user.replace_all_uses_with(result)
        node.replace_all_uses_with(emit(node, aten.unsqueeze.default, result, dim))
        return


def _is_matrix_per_row(node: fx.Node) -> bool:
    """Whether a tensor contains a matrix for every row, `w[experts]`."""
    if node.target is not aten.index.Tensor:
        return False
    table, positions = operands(node)
    single = len(positions) == 1 and isinstance(positions[0], fx.Node)
    return single and table.meta["val"].dim() == 3 and positions[0].meta["val"].dim() == 1


def _embedding_bag(node: fx.Node) -> None:
    """An embedding bag of a two-dimensional input (bags of equal size, which export numbers by an
    `arange`) becomes a look-up and a reduction: then the bags are independent."""
    a = arguments_of(node)
    indices, offsets = a["indices"], a["offsets"]
    if offsets.target is not aten.arange.start_step or indices.meta["val"].dim() != 1:
        return
    start, end, step = (*offsets.args, 1)[:3]
    results = {operands(user)[1] for user in node.users if user.users}
    plain = not (a["scale_grad_by_freq"] or a["sparse"] or a["include_last_offset"])
    padding = a.get("padding_idx")
    if (start, end) != (0, indices.meta["val"].numel()) or end % step or end == 0:
        return
    if not plain or not results <= {0}:
        return
    rows = emit(node, aten.reshape.default, indices, [end // step, step])
    vectors = emit(node, aten.embedding.default, a["weight"], rows)
    if a["per_sample_weights"] is not None:
        shape = [end // step, step, 1]
        weights = emit(node, aten.reshape.default, a["per_sample_weights"], shape)
        vectors = emit(node, aten.mul.Tensor, vectors, weights)
    if padding is None:
        result = _of_bags(node, vectors, a["mode"])
    else:
        row = padding % a["weight"].meta["val"].shape[0]
        result = _of_padded_bags(node, vectors, emit(node, aten.eq.Scalar, rows, row), a["mode"])
    for user in list(node.users):
        if user.users:
            user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _of_bags(node: fx.Node, vectors: fx.Node, mode: int) -> fx.Node:
    """Sum (mode 0), mean (1) or maximum (2) of vectors [bags, entries, width] over the entries."""
    if mode == 2:
        return emit(node, operator.getitem, emit(node, aten.max.dim, vectors, 1), 0)
    return emit(node, aten.sum.dim_IntList if mode == 0 else aten.mean.dim, vectors, [1])


def _of_padded_bags(node: fx.Node, vectors: fx.Node, padding: fx.Node, mode: int) -> fx.Node:
    """The same without the entries at `padding`, bool [bags, entries]; zero where none is left."""
    hidden = emit(node, aten.reshape.default, padding, [*padding.meta["val"].shape, 1])
    fill = -math.inf if mode == 2 else 0.0
    kept = emit(node, aten.masked_fill.Scalar, vectors, hidden, fill)
    if mode == 0:
        return _of_bags(node, kept, 0)
    if mode == 2:
        empty = emit(node, aten.all.dim, padding, 1, True)
        return emit(node, aten.masked_fill.Scalar, _of_bags(node, kept, 2), empty, 0.0)
    left = emit(node, aten.logical_not.default, padding)
    counts = emit(node, aten.sum.dim_IntList, left, [1], True)
    counts = emit(node, aten.clamp.default, counts, 1)
    return emit(node, aten.div.Tensor, _of_bags(node, kept, 0), counts)


def _times_one(node: fx.Node) -> None:
    """A factor of one (T5's scale, BART's embeddings) does not change a float and is removed."""
    _remove_identity(node, 1)


def _plus_zero(node: fx.Node) -> None:
    """An added zero, with which `sum(losses)` and `loss = 0; loss += part` begin, is removed: then
    the loss is a sum over the parts of a batch."""
    _remove_identity(node, 0)


def _remove_identity(node: fx.Node, number: int) -> None:
    """Remove a call whose second argument is the number that changes no float."""
    source, other = node.args[:2]
    if isinstance(other, fx.Node) or other != number or not isinstance(source, fx.Node):
        return
    was, value = source.meta["val"], node.meta["val"]
    same = (was.dtype, was.shape, was.stride()) == (value.dtype, value.shape, value.stride())
    is_output = any(u.op == "output" for u in node.users)  # then it must be a value of its own
    source_is_output = source.op != "call_function" or any(u.op == "output" for u in source.users)
    if same and was.is_floating_point() and not (is_output and source_is_output):
        replace_call(node, source)


def _softmax(node: fx.Node) -> None:
    """Softmax in the dtype of its input, as transformers asks for, loses its dtype
    argument."""
    source, dim, *dtype = operands(node)
    if dtype and dtype[0] is source.meta["val"].dtype:
        node.args = (source, dim)


def _as_type(node: fx.Node) -> None:
    """`type_as` is removed if the dtype is the same already, as T5's scores are."""
    source, like = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(like, fx.Node)
    was, wanted = source.meta["val"], like.meta["val"]
    if (was.dtype, was.device) == (wanted.dtype, wanted.device):
        if all(u.op != "output" for u in node.users):
            replace_call(node, source)


_REMOVED = {
    aten.detach_.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
}
_CHECKS = {  # metadata, or values: eager mode raises, a step does not wait for them
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_REWRITES: dict[Any, Callable[[fx.Node], None]] = {
    **LOSSES,
    aten.matmul.default: _linear,
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
    aten.native_dropout.default: _dropout,
    aten.softmax.int: _softmax,
    aten.type_as.default: _as_type,
    aten.mul.Tensor: _times_one,
    aten.div.Tensor: _times_one,
    aten.add.Tensor: _plus_zero,
    aten.cat.default: _concatenate,
    aten.copy.default: _slice_write,
    aten.broadcast_tensors.default: _broadcast,
    aten.repeat.default: _repeat,
    aten.index_put.default: _masked_write,
    aten.as_strided.default: strided_read,
    aten.as_strided_scatter.default: strided_write,
    aten.bmm.default: _expert_matmul,
    aten.scaled_dot_product_attention.default: causal_attention,
}
