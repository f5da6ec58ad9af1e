"""Sharding rules of losses: a sum over examples is a partial sum; a mean cannot be sharded."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.kernels.ops import ctc_loss
from graphaccel.sharding.rules.notation import (
    Indices,
    Notation,
    Rules,
    broadcast,
    index_names,
    output_shapes,
    shape_of,
    tensor_arguments,
)

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # at::Reduction


def _scores(tensor: fx.Node) -> Indices:
    """Names for scores of shape [c], [n, c] or [n, c, y, x]."""
    rank = len(shape_of(tensor))
    return ("c",) if rank == 1 else ("n", "c", "y", "x")[:rank]


def _labelled_loss(node: fx.Node) -> Notation:
    """nll_loss: scores and labels to a loss and the total weight of the labels."""
    tensors = tensor_arguments(node)
    reduction = arguments(node)["reduction"]
    scores = _scores(tensors[0])
    labels = tuple(i for i in scores if i != "c")
    inputs = (scores, labels, *(("c",) for _ in tensors[2:]))
    out = labels if reduction == _NONE else ()
    whole = frozenset(scores) if reduction == _MEAN else frozenset({"c"})
    return Notation(
        inputs, (out, ()), whole, kept=frozenset({1}) if reduction == _NONE else frozenset()
    )


def _labelled_loss_backward(node: fx.Node) -> Notation:
    """The incoming gradient is one number; the total weight is read only by a mean."""
    tensors = tensor_arguments(node)
    reduction = arguments(node)["reduction"]
    scores = _scores(tensors[1])
    labels = tuple(i for i in scores if i != "c")
    gradient = labels if reduction == _NONE else ()
    inputs = (gradient, scores, labels, *(("c",) for _ in tensors[3:-1]), ())
    unread = frozenset() if reduction == _MEAN else frozenset({len(inputs) - 1})
    return Notation(inputs, (scores,), frozenset({"c"}), (frozenset({0}),), unread=unread)


def _elementwise_loss(node: fx.Node) -> Notation:
    """mse_loss and similar ones, on two (or, weighted, three) tensors of one shape."""
    reduction = arguments(node)["reduction"]
    if reduction == _NONE:
        return broadcast(node)
    shapes = [shape_of(t) for t in tensor_arguments(node)]
    full = torch.broadcast_shapes(*shapes)
    names = index_names(len(full))
    inputs = []
    for shape in shapes:
        offset = len(full) - len(shape)
        inputs.append(
            tuple(
                "1" if n == 1 and full[offset + k] != 1 else names[offset + k]
                for k, n in enumerate(shape)
            )
        )
    whole = frozenset(names) if reduction == _MEAN else frozenset()
    return Notation(tuple(inputs), ((),), whole, sums=reduction != _MEAN)


def _elementwise_loss_backward(node: fx.Node) -> Notation:
    """Linear in the incoming gradient, one number unless nothing was reduced. A mean divides by the
    number of elements, so nothing may be sharded."""
    result = broadcast(node, linear=[(0,)])
    if arguments(node)["reduction"] == _MEAN:
        return Notation(result.inputs, result.outputs, frozenset(result.outputs[0]), result.linear)
    return result


def _margins(node: fx.Node) -> Notation:
    """multi_margin_loss, multilabel_margin_loss: the class dim of an example cannot be sharded."""
    tensors = tensor_arguments(node)
    scores, whole, single = _margin_dims(node, tensors[0])
    results = (single, *(scores for _ in output_shapes(node)[1:]))
    return Notation((scores, *_margin_labels(node, scores, tensors[1:])), results, whole)


def _margins_backward(node: fx.Node) -> Notation:
    tensors = tensor_arguments(node)
    scores, whole, single = _margin_dims(node, tensors[1])
    inputs = (single, scores, *_margin_labels(node, scores, tensors[2:]))
    return Notation(inputs, (scores,), whole, (frozenset({0}),))


def _margin_dims(node: fx.Node, scores: fx.Node) -> tuple[Indices, frozenset[str], Indices]:
    """Names of the scores, those that cannot be sharded, and the names of the loss."""
    names = ("n", "c")[2 - len(shape_of(scores)) :]
    reduction = arguments(node)["reduction"]
    whole = frozenset({"c", "n"} if reduction == _MEAN else {"c"})
    return names, whole, names[:-1] if reduction == _NONE else ()


def _margin_labels(node: fx.Node, scores: Indices, tensors: list[fx.Node]) -> list[Indices]:
    """One class for each example and class weights; or several, and which of them counted."""
    if "multilabel" in str(node.target):
        return [scores for _ in tensors]
    rank = len(shape_of(tensors[0]))
    labels = scores[:-1] if rank < len(scores) else ("",) * rank
    return [labels, ("c",)][: len(tensors)]


def _ctc(node: fx.Node) -> Notation:
    """Concatenated targets of all examples cannot be sharded: each offset depends on the
    lengths."""
    several = len(shape_of(tensor_arguments(node)[1])) == 2
    targets = ("n", "s") if several else ("s",)
    whole = frozenset("tcs") if several else frozenset("tcsn")
    scores = ("t", "n", "c")
    return Notation((scores, targets, ("n",), ("n",)), (("n",), scores), whole)


RULES: Rules = MappingProxyType(
    {
        ctc_loss.OP: _ctc,
        aten.nll_loss_forward.default: _labelled_loss,
        aten.nll_loss_backward.default: _labelled_loss_backward,
        aten.nll_loss2d_forward.default: _labelled_loss,
        aten.nll_loss2d_backward.default: _labelled_loss_backward,
        aten.mse_loss.default: _elementwise_loss,
        aten.mse_loss_backward.default: _elementwise_loss_backward,
        aten.smooth_l1_loss.default: _elementwise_loss,
        aten.smooth_l1_loss_backward.default: _elementwise_loss_backward,
        aten.huber_loss.default: _elementwise_loss,
        aten.huber_loss_backward.default: _elementwise_loss_backward,
        aten.binary_cross_entropy.default: _elementwise_loss,
        aten.binary_cross_entropy_backward.default: _elementwise_loss_backward,
        aten.binary_cross_entropy_with_logits.default: _elementwise_loss,
        aten.multi_margin_loss.default: _margins,
        aten.multi_margin_loss_backward.default: _margins_backward,
        aten.multilabel_margin_loss_forward.default: _margins,
        aten.multilabel_margin_loss_backward.default: _margins_backward,
        aten.soft_margin_loss.default: _elementwise_loss,
        aten.soft_margin_loss_backward.default: _elementwise_loss_backward,
    }
)
