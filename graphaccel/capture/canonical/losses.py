"""Rewrites means and mean losses of a forward graph as a sum divided by a count.

before                                               after
  %l: f32[] = aten.mean(%x)                            %s: f32[] = aten.sum(%x)
                                                       %l: f32[] = aten.div(%s, 32)
  %l: f32[] = aten.cross_entropy_loss(%x, %t)          %n: f32[] = cross_entropy(%x, %t, "sum")
                                                       %m: b8[8] = aten.ne(%t, -100)
                                                       %c: i64[] = aten.sum(%m)
                                                       %l: f32[] = aten.div(%n, %c)

A sum over part of the batch is a partial sum, while a mean over part of the batch is wrong when the
parts hold different numbers of ignored labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphaccel.capture.canonical.calls import arguments_of, emit, replace_call, with_arguments

aten = torch.ops.aten
SUM = 2  # at::Reduction::Sum
MEAN = 1


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
        total = emit(node, aten.sum.dim_IntList, source, wanted, keep, dtype=dtype)
    else:
        total = emit(node, aten.sum.default, source, dtype=dtype)
    replace_call(node, emit(node, aten.div.Tensor, total, count))
    if not dims:
        _sum_of_losses(total)


def _pool_to_one(node: fx.Node) -> None:
    """Adaptive pooling to one cell is a mean over the spatial dims."""
    args: tuple[Any, ...] = node.args
    source, size = args[:2]
    if any(n != 1 for n in size):
        return
    dims = list(range(-len(size), 0))
    replace_call(node, emit(node, aten.mean.dim, source, dims, True))


def _with_sum(node: fx.Node, arguments: dict[str, Any]) -> fx.Node:
    """The same loss with reduction "sum" instead of "mean"."""
    return with_arguments(node, arguments | {"reduction": SUM})


def _cross_entropy_of_log_softmax(node: fx.Node, a: dict[str, Any]) -> fx.Node | None:
    """`nll_loss(log_softmax(x))` is the cross entropy of x, which may be reshaped in between; None
    for others."""
    source = a["self"]
    shaped = source.target is aten.reshape.default
    logarithms = source.args[0] if shaped else source
    if logarithms.target is not aten.log_softmax.int:
        return None
    scores = logarithms.args[0]
    was, value = scores.meta["val"], source.meta["val"]
    last = logarithms.args[1] % was.dim() == was.dim() - 1
    same_dtype = logarithms.meta["val"].dtype == was.dtype
    if value.dim() != 2 or not (last and same_dtype and was.shape[-1] == value.shape[-1]):
        return None
    if shaped:
        scores = emit(node, aten.reshape.default, scores, source.args[1])
    arguments = scores, a["target"], a["weight"], a["reduction"], a["ignore_index"], 0.0
    return emit(node, aten.cross_entropy_loss.default, *arguments)


def _loss_of_rows(node: fx.Node, a: dict[str, Any]) -> fx.Node | None:
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
    rows = emit(node, aten.reshape.default, source.args[0], [-1, width])
    flat = emit(node, aten.reshape.default, target, [-1])
    return emit(node, node.target, *(a | {"self": rows, "target": flat}).values())


def _labelled_loss(node: fx.Node) -> None:
    """cross_entropy_loss and nll_loss: the mean is a sum over the labels that are not ignored."""
    a = arguments_of(node)
    if node.target is aten.nll_loss_nd.default:
        other = _cross_entropy_of_log_softmax(node, a)
    elif node.target is aten.cross_entropy_loss.default:
        other = _loss_of_rows(node, a)
    else:
        other = None
    if other is not None:
        replace_call(node, other)
        node, a = other, arguments_of(other)
    if a["reduction"] != MEAN:
        return
    scores, target = a["self"], a["target"]
    total = _with_sum(node, a)
    if target.meta["val"].is_floating_point():  # class probabilities: mean over positions
        shape = scores.meta["val"].shape
        replace_call(
            node, emit(node, aten.div.Tensor, total, scores.meta["val"].numel() // shape[1])
        )
        return
    counted = emit(node, aten.ne.Scalar, target, a["ignore_index"])
    if a["weight"] is None:
        count = emit(node, aten.sum.default, counted)
    else:
        safe = emit(node, aten.where.ScalarOther, counted, target, 0)
        flat = emit(node, aten.reshape.default, safe, [-1])
        weights = emit(node, aten.index_select.default, a["weight"], 0, flat)
        counted_weights = emit(
            node, aten.mul.Tensor, weights, emit(node, aten.reshape.default, counted, [-1])
        )
        count = emit(node, aten.sum.default, counted_weights)
    replace_call(node, emit(node, aten.div.Tensor, total, count))


def _sum_of_losses(node: fx.Node) -> None:
    """The full sum of the losses of all rows is the loss with reduction "sum"."""
    source, *dims = node.args
    assert isinstance(source, fx.Node)
    if source.target is not aten.cross_entropy_loss.default or len(source.users) > 1 or dims:
        return
    a = arguments_of(source)
    if a["reduction"] == 0 and node.kwargs.get("dtype") in (None, source.meta["val"].dtype):
        replace_call(node, _with_sum(source, a))


def _elementwise_loss(node: fx.Node) -> None:
    """mse_loss and similar ones: the mean is a sum divided by the number of elements."""
    a = arguments_of(node)
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
    replace_call(node, emit(node, aten.div.Tensor, total, torch.Size(shape).numel()))


def _reduced_loss(node: fx.Node) -> None:
    """Losses that torch composes of other ops: the mean is that of the unreduced loss."""
    a = arguments_of(node)
    if a["reduction"] != MEAN:
        return
    each = with_arguments(node, a | {"reduction": 0})
    total = emit(node, aten.sum.default, each)
    replace_call(node, emit(node, aten.div.Tensor, total, each.meta["val"].numel()))


LOSSES: dict[Any, Callable[[fx.Node], None]] = {
    aten.mean.default: _mean,
    aten.sum.default: _sum_of_losses,
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
    aten.adaptive_avg_pool1d.default: _pool_to_one,
    aten.adaptive_avg_pool2d.default: _pool_to_one,
    aten.adaptive_avg_pool3d.default: _pool_to_one,
}
"""Op → its rewrite, which changes nothing where the call is not a mean over examples."""
