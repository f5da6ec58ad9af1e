"""Canonicalise a forward graph: one form per computation, for fusion and sharding rules.

before                                               after
  %y: f32[8,4] = aten.native_dropout(%x, 0.0, True)    (uses %x)
  %l: f32[] = aten.mean(%x)                            %s: f32[] = aten.sum(%x)
                                                       %l: f32[] = aten.div(%s, 32)
  %l: f32[] = aten.cross_entropy_loss(%x, %t)          %n: f32[] = cross_entropy(%x, %t, "sum")
                                                       %m: b8[8] = aten.ne(%t, -100)
                                                       %c: i64[] = aten.sum(%m)
                                                       %l: f32[] = aten.div(%n, %c)
  %v: f32[6,4,2] = aten.index(%w, [%e])                %y: f32[6,4] = expert_product(%x, %w, %e)
  %y: f32[6,4,1] = aten.bmm(%v, aten.unsqueeze(%x, -1))

Means become a sum divided by a count. A sum over part of the batch is a partial sum, while a mean
over part of the batch is wrong when the parts hold different numbers of ignored labels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.capture.causal import causal_attention
from graphaccel.compat.torch.ops import schema
from graphaccel.kernels.experts import PRODUCT

aten = torch.ops.aten
SUM = 2  # at::Reduction::Sum
MEAN = 1


def canonicalise(graph: fx.GraphModule) -> None:
    """Rewrite `graph`, a functional forward graph with `meta["val"]` on every node, in place."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _REMOVED:
            _replace(node, node.args[0])
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


def _replace(node: fx.Node, value: Any) -> None:
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _emit(before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node just before `before`, with its provenance and a fake value."""
    graph = before.graph
    with graph.inserting_before(before):
        new = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if key in before.meta:
            new.meta[key] = before.meta[key]
    new.meta["made_by"] = "canonicalise"
    values: Any = map_arg((args, kwargs), lambda n: n.meta["val"])
    made = target(*values[0], **values[1])
    # A fake view refers to its base, which cannot be sent to other ranks.
    new.meta["val"] = made.clone() if target is aten.reshape.default else made
    return new


def _mean(node: fx.Node) -> None:
    args: tuple[Any, ...] = node.args
    source = args[0]
    dims = args[1] if len(args) > 1 else None
    keep = args[2] if len(args) > 2 else node.kwargs.get("keepdim", False)
    dtype = node.kwargs.get("dtype")
    shape = source.meta["val"].shape
    wanted = sorted(d % len(shape) for d in dims) if dims else list(range(len(shape)))
    if 0 not in wanted:
        return  # a mean within each example
    count = 1
    for dim in wanted:
        count *= shape[dim]
    if dims:
        total = _emit(node, aten.sum.dim_IntList, source, wanted, keep, dtype=dtype)
    else:
        total = _emit(node, aten.sum.default, source, dtype=dtype)
    _replace(node, _emit(node, aten.div.Tensor, total, count))
    if not dims:
        _summed(total)


def _pool(node: fx.Node) -> None:
    """Adaptive pooling to one cell is a mean over the spatial dims."""
    args: tuple[Any, ...] = node.args
    source, size = args[:2]
    if any(n != 1 for n in size):
        return
    dims = list(range(-len(size), 0))
    _replace(node, _emit(node, aten.mean.dim, source, dims, True))


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by schema name, defaults filled in."""
    given = dict(zip((a.name for a in schema(node)), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema(node)}


def _with_sum(node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
    """The same loss with reduction "sum" instead of "mean"."""
    return _with_arguments(node, arguments | {"reduction": SUM})


def _with_arguments(node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
    """A call of the same op just before `node`, with these values for all its arguments."""
    named = {a.name for a in schema(node) if a.kwarg_only}
    values = [value for name, value in arguments.items() if name not in named]
    keywords = {name: value for name, value in arguments.items() if name in named}
    return _emit(node, node.target, *values, **keywords)


def _of_logarithms(node: fx.Node, a: dict[str, Any]) -> fx.Node | None:
    """`nll_loss(log_softmax(x))` is the cross entropy of x, which may be reshaped in between; None
    for others."""
    source = a["self"]
    shaped = source.target is aten.reshape.default
    made = source.args[0] if shaped else source
    if made.target is not aten.log_softmax.int:
        return None
    given = made.args[0]
    was, value = given.meta["val"], source.meta["val"]
    last = made.args[1] % was.dim() == was.dim() - 1
    own = made.meta["val"].dtype == was.dtype
    if value.dim() != 2 or not (last and own and was.shape[-1] == value.shape[-1]):
        return None
    if shaped:
        given = _emit(node, aten.reshape.default, given, source.args[1])
    arguments = given, a["target"], a["weight"], a["reduction"], a["ignore_index"], 0.0
    return _emit(node, aten.cross_entropy_loss.default, *arguments)


def _in_rows(node: fx.Node, a: dict[str, Any]) -> fx.Node | None:
    """The loss of scores whose classes were moved before the positions ([b, s, v] to [b, v, s]), as
    the loss of rows; None for others."""
    source, target = a["self"], a["target"]
    if source.target is not aten.transpose.int or source.meta["val"].dim() != 3:
        return None
    if {d % 3 for d in source.args[1:]} != {1, 2} or target.meta["val"].dim() != 2:
        return None
    if a["reduction"] == 0:
        return None
    width = source.meta["val"].shape[1]
    rows = _emit(node, aten.reshape.default, source.args[0], [-1, width])
    flat = _emit(node, aten.reshape.default, target, [-1])
    return _emit(node, node.target, *(a | {"self": rows, "target": flat}).values())


def _labelled_loss(node: fx.Node) -> None:
    """cross_entropy_loss and nll_loss: the mean is a sum over the labels that are not ignored."""
    a = _arguments(node)
    if node.target is aten.nll_loss_nd.default:
        other = _of_logarithms(node, a)
    elif node.target is aten.cross_entropy_loss.default:
        other = _in_rows(node, a)
    else:
        other = None
    if other is not None:
        _replace(node, other)
        node, a = other, _arguments(other)
    if a["reduction"] != MEAN:
        return
    scores, target = a["self"], a["target"]
    total = _with_sum(node, a)
    if target.meta["val"].is_floating_point():  # class probabilities: mean over positions
        shape = scores.meta["val"].shape
        _replace(node, _emit(node, aten.div.Tensor, total, scores.meta["val"].numel() // shape[1]))
        return
    counted = _emit(node, aten.ne.Scalar, target, a["ignore_index"])
    if a["weight"] is None:
        count = _emit(node, aten.sum.default, counted)
    else:
        safe = _emit(node, aten.where.ScalarOther, counted, target, 0)
        flat = _emit(node, aten.reshape.default, safe, [-1])
        weights = _emit(node, aten.index_select.default, a["weight"], 0, flat)
        kept = _emit(
            node, aten.mul.Tensor, weights, _emit(node, aten.reshape.default, counted, [-1])
        )
        count = _emit(node, aten.sum.default, kept)
    _replace(node, _emit(node, aten.div.Tensor, total, count))


def _summed(node: fx.Node) -> None:
    """The full sum of the losses of all rows is the loss with reduction "sum"."""
    source, *dims = node.args
    assert isinstance(source, fx.Node)
    if source.target is not aten.cross_entropy_loss.default or len(source.users) > 1 or dims:
        return
    a = _arguments(source)
    if a["reduction"] == 0 and node.kwargs.get("dtype") in (None, source.meta["val"].dtype):
        _replace(node, _with_sum(source, a))


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
        _replace(node, _emit(node, aten.linear.default, left, weight))


def _elementwise_loss(node: fx.Node) -> None:
    """mse_loss and similar ones: the mean is a sum divided by the number of elements."""
    a = _arguments(node)
    if a["reduction"] != MEAN:
        return
    shape = torch.broadcast_shapes(
        *(
            a[key].meta["val"].shape
            for key in ("self", "target", "weight")
            if isinstance(a.get(key), fx.Node)
        )
    )
    total = _with_sum(node, a)
    _replace(node, _emit(node, aten.div.Tensor, total, torch.Size(shape).numel()))


def _reduced_loss(node: fx.Node) -> None:
    """Losses that torch composes of other ops: the mean is that of the unreduced loss."""
    a = _arguments(node)
    if a["reduction"] != MEAN:
        return
    each = _with_arguments(node, a | {"reduction": 0})
    total = _emit(node, aten.sum.default, each)
    _replace(node, _emit(node, aten.div.Tensor, total, each.meta["val"].numel()))


def _dropout(node: fx.Node) -> None:
    """Dropout with p = 0, or outside training, is its input."""
    source, p, train = node.args
    if p != 0.0 and train is not False:
        return
    for user in list(node.users):
        if user.args[1] == 0:
            _replace(user, source)
        elif user.users:
            return  # the mask has a reader
        else:
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _concatenate(node: fx.Node) -> None:
    """Legacy empty tensors of shape (0,) in a concatenation (initial caches) are dropped."""
    given: Any = node.args[0]
    tensors = [t for t in given if tuple(t.meta["val"].shape) != (0,)]
    if len(tensors) == 1:
        _replace(node, tensors[0])
    elif len(tensors) < len(given):
        node.args = (tensors, *node.args[1:])


def _written(node: fx.Node) -> None:
    """The value of a write into a slice (`x[:, 0] = y`): `copy` has no derivative of its own, so it
    becomes the source, in the dtype and shape of the destination."""
    into, source = node.args[:2]
    assert isinstance(into, fx.Node)
    assert isinstance(source, fx.Node)
    old, new = into.meta["val"], source.meta["val"]
    if new.dtype != old.dtype:
        source = _emit(node, aten._to_copy.default, source, dtype=old.dtype)
    if new.shape != old.shape:
        source = _emit(node, aten.expand.default, source, list(old.shape))
    _replace(node, source)


def _masked(node: fx.Node) -> None:
    """One number written where a mask is true (`x[x > 1] = 3`) becomes an elementwise `where`."""
    given = _arguments(node)
    into, places, value = given["self"], given["indices"], given["values"]
    if given["accumulate"] or len(places) != 1 or not isinstance(places[0], fx.Node):
        return
    (mask,) = places
    kept, put = mask.meta["val"], value.meta["val"]
    old = into.meta["val"]
    if kept.dtype != torch.bool or put.numel() != 1 or put.dtype != old.dtype:
        return
    for _ in range(old.dim() - kept.dim()):
        mask = _emit(node, aten.unsqueeze.default, mask, -1)
    value = _emit(node, aten.reshape.default, value, []) if put.dim() else value
    _replace(node, _emit(node, aten.where.self, mask, value, into))


def _chosen_product(node: fx.Node) -> None:
    """A matmul with a weight looked up for every row (Hugging Face's `batched_mm`):
    expert_product."""
    left, right = node.args
    for weights, rows, transposed in ((left, right, True), (right, left, False)):
        dim = 2 if transposed else 1
        if not _one_each(weights) or rows.meta["val"].shape[dim] != 1:
            continue
        table, (experts,) = weights.args[0], weights.args[1]
        count = table.meta["val"].shape[0]
        made_so = rows.target is aten.unsqueeze.default and rows.args[1] % 3 == dim
        flat = rows.args[0] if made_so else _emit(node, aten.squeeze.dim, rows, dim)
        made = _emit(node, PRODUCT, flat, table, experts, 0, count, transposed)
        for user in node.users:
            if user.target is aten.squeeze.dim and user.args[1] % 3 == (2 if transposed else 1):
                user.replace_all_uses_with(made)
        node.replace_all_uses_with(_emit(node, aten.unsqueeze.default, made, dim))
        return


def _bags(node: fx.Node) -> None:
    """An embedding bag of a two-dimensional input (bags of equal size, which export numbers by an
    `arange`) becomes a look-up and a reduction: then the bags are independent."""
    a = _arguments(node)
    indices, offsets = a["indices"], a["offsets"]
    if offsets.target is not aten.arange.start_step or indices.meta["val"].dim() != 1:
        return
    start, end, step = (*offsets.args, 1)[:3]
    results = {user.args[1] for user in node.users if user.users}
    plain = not (a["scale_grad_by_freq"] or a["sparse"] or a["include_last_offset"])
    padded = a.get("padding_idx") is not None
    if (start, end) != (0, indices.meta["val"].numel()) or end % step or end == 0:
        return
    if not plain or padded or not results <= {0}:
        return
    rows = _emit(node, aten.reshape.default, indices, [end // step, step])
    found = _emit(node, aten.embedding.default, a["weight"], rows)
    if a["per_sample_weights"] is not None:
        shape = [end // step, step, 1]
        weights = _emit(node, aten.reshape.default, a["per_sample_weights"], shape)
        found = _emit(node, aten.mul.Tensor, found, weights)
    if a["mode"] == 2:
        extreme = _emit(node, aten.max.dim, found, 1)
        made = _emit(node, operator.getitem, extreme, 0)
    else:
        reduction = aten.sum.dim_IntList if a["mode"] == 0 else aten.mean.dim
        made = _emit(node, reduction, found, [1])
    for user in list(node.users):
        if user.users:
            user.replace_all_uses_with(made)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _times_one(node: fx.Node) -> None:
    """A factor of one (T5's scale, BART's embeddings) does not change a float and is removed."""
    _nothing(node, 1)


def _plus_zero(node: fx.Node) -> None:
    """So is the 0 with which `sum(losses)` and `loss = 0; loss += part` begin: without it, the loss
    is a sum over the parts of a batch."""
    _nothing(node, 0)


def _nothing(node: fx.Node, number: int) -> None:
    """Remove a call whose second argument is the number that changes no float."""
    source, other = node.args[:2]
    if isinstance(other, fx.Node) or other != number or not isinstance(source, fx.Node):
        return
    was, value = source.meta["val"], node.meta["val"]
    same = (was.dtype, was.shape, was.stride()) == (value.dtype, value.shape, value.stride())
    given = any(u.op == "output" for u in node.users)  # then it must be a value of its own
    taken = source.op != "call_function" or any(u.op == "output" for u in source.users)
    if same and was.is_floating_point() and not (given and taken):
        _replace(node, source)


def _softmax(node: fx.Node) -> None:
    """Softmax in the dtype that it has anyway, as transformers asks for, loses its dtype
    argument."""
    source, dim, *dtype = node.args
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
            _replace(node, source)


def _one_each(node: fx.Node) -> bool:
    """Whether a tensor contains a matrix for every row, `w[experts]`."""
    if node.target is not aten.index.Tensor:
        return False
    table, positions = node.args
    single = len(positions) == 1 and isinstance(positions[0], fx.Node)
    return single and table.meta["val"].dim() == 3 and positions[0].meta["val"].dim() == 1


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
    aten.mean.default: _mean,
    aten.sum.default: _summed,
    aten.matmul.default: _linear,
    aten.mean.dim: _mean,
    aten.cross_entropy_loss.default: _labelled_loss,
    aten.nll_loss_nd.default: _labelled_loss,
    aten.nll_loss.default: _labelled_loss,
    aten.nll_loss2d.default: _labelled_loss,
    aten.mse_loss.default: _elementwise_loss,
    aten.l1_loss.default: _elementwise_loss,
    aten.smooth_l1_loss.default: _elementwise_loss,
    aten.huber_loss.default: _elementwise_loss,
    aten.binary_cross_entropy.default: _elementwise_loss,
    aten.binary_cross_entropy_with_logits.default: _elementwise_loss,
    aten.kl_div.default: _elementwise_loss,
    aten.soft_margin_loss.default: _elementwise_loss,
    aten.margin_ranking_loss.default: _reduced_loss,
    aten.hinge_embedding_loss.default: _reduced_loss,
    aten.poisson_nll_loss.default: _reduced_loss,
    aten.cosine_embedding_loss.default: _reduced_loss,
    aten.triplet_margin_loss.default: _reduced_loss,
    aten.multi_margin_loss.default: _reduced_loss,
    aten.multilabel_margin_loss.default: _reduced_loss,
    aten.embedding_bag.default: _bags,
    aten.embedding_bag.padding_idx: _bags,
    aten.native_dropout.default: _dropout,
    aten.softmax.int: _softmax,
    aten.type_as.default: _as_type,
    aten.mul.Tensor: _times_one,
    aten.div.Tensor: _times_one,
    aten.add.Tensor: _plus_zero,
    aten.adaptive_avg_pool1d.default: _pool,
    aten.adaptive_avg_pool2d.default: _pool,
    aten.adaptive_avg_pool3d.default: _pool,
    aten.cat.default: _concatenate,
    aten.copy.default: _written,
    aten.index_put.default: _masked,
    aten.bmm.default: _chosen_product,
    aten.scaled_dot_product_attention.default: causal_attention,
}
