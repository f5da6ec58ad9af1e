"""Local forms of calls that need more than smaller arguments when one of their dims is sharded.

Each function builds the local form of one call (`sharding.rules.strategies.Row.lowering`) from its
local arguments. Sources: vocabulary-parallel embedding and cross-entropy: Shoeybi et al.,
Megatron-LM, 2019, §3; queries sharded along the sequence: Grattafiori et al., The Llama 3 Herd of
Models, 2024, §3.3.2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import fx

from graphaccel.ir.values import operands
from graphaccel.sharding.apply.graph_builder import Emitter
from graphaccel.sharding.apply.random_parts import DROPOUT_PART

aten = torch.ops.aten
_IGNORED = -100

# Builds the results of `node`, one per tensor it returns, from its local tensor arguments.
Lowering: TypeAlias = Callable[[Emitter, fx.Node, list[fx.Node]], list[fx.Node]]


def own_rows(emit: Emitter, ids: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """Indices relative to this rank's first row, and which of them are this rank's."""
    moved = emit.call(aten.sub.Tensor, ids, 0, bind={1: rows})
    low = emit.call(aten.ge.Scalar, moved, 0)
    high = emit.call(aten.lt.Scalar, moved, rows)
    return moved, emit.call(aten.logical_and.default, low, high)


def _replaced(emit: Emitter, own: fx.Node, kept: fx.Node, other: int) -> fx.Node:
    elsewhere = emit.call(aten.logical_not.default, own)
    return emit.call(aten.masked_fill.Scalar, kept, elsewhere, other)


def _embedding(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    table, ids = tensors
    moved, own = own_rows(emit, ids, table.meta["val"].shape[0])
    match = emit.call(aten.embedding.default, table, _replaced(emit, own, moved, 0))
    elsewhere = emit.call(aten.logical_not.default, own)
    elsewhere = emit.call(aten.unsqueeze.default, elsewhere, len(elsewhere.meta["val"].shape))
    return [emit.call(aten.masked_fill.Scalar, match, elsewhere, 0.0)]


def _embedding_backward(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    """Gradients of other ranks' rows are written to one extra row, which is cut off."""
    gradient, ids = tensors
    count, padding = int(operands(node)[2]), int(operands(node)[3])
    rows = -(-count // emit.ranks)  # rounded up: the last rank may have padding
    moved, own = own_rows(emit, ids, rows)
    if padding >= 0:
        used = emit.call(aten.ne.Scalar, ids, padding)
        own = emit.call(aten.logical_and.default, own, used)
    safe = _replaced(emit, own, moved, rows)
    grown = emit.call(aten.embedding_dense_backward.default, gradient, safe, rows + 1, -1, False)
    return [emit.call(aten.narrow.default, grown, 0, 0, rows)]


def _look_up(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    table, ids = tensors
    moved, own = own_rows(emit, ids, table.meta["val"].shape[0])
    match = emit.call(aten.index.Tensor, table, [_replaced(emit, own, moved, 0)])
    elsewhere = emit.call(aten.logical_not.default, own)
    for _ in table.meta["val"].shape[1:]:
        elsewhere = emit.call(aten.unsqueeze.default, elsewhere, len(elsewhere.meta["val"].shape))
    return [emit.call(aten.masked_fill.Scalar, match, elsewhere, 0.0)]


def _look_up_backward(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    """Gradients of other ranks' rows are written to one extra row, which is cut off."""
    _, ids, values = tensors
    whole = node.meta["val"].shape
    rows = whole[0] // emit.ranks
    moved, own = own_rows(emit, ids, rows)
    built = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
    zeros = emit.call_with(aten.zeros.default, ([rows + 1, *whole[1:]],), built)
    safe = _replaced(emit, own, moved, rows)
    grown = emit.call(aten.index_put.default, zeros, [safe], values, True)
    return [emit.call(aten.narrow.default, grown, 0, 0, rows)]


def _softmax(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    name, dim = str(node.target), [int(operands(node)[2 if len(tensors) == 2 else 1])]
    log = "log" in name
    if len(tensors) == 2:
        gradient, result = tensors
        weight = emit.call(aten.exp.default, result) if log else result
        summed = gradient if log else emit.call(aten.mul.Tensor, gradient, result)
        total = emit.all_reduce(emit.call(aten.sum.dim_IntList, summed, dim, True))
        if log:
            taken = emit.call(aten.mul.Tensor, weight, total)
            return [emit.call(aten.sub.Tensor, gradient, taken)]
        moved = emit.call(aten.sub.Tensor, gradient, total)
        return [emit.call(aten.mul.Tensor, result, moved)]
    (scores,) = tensors
    if scores.meta["val"].dtype != node.meta["val"].dtype:
        dtype = {"dtype": node.meta["val"].dtype}
        scores = emit.call_with(aten._to_copy.default, (scores,), dtype)
    highest = emit.all_reduce(emit.call(aten.amax.default, scores, dim, True), "max")
    moved = emit.call(aten.sub.Tensor, scores, highest)
    powers = emit.call(aten.exp.default, moved)
    total = emit.all_reduce(emit.call(aten.sum.dim_IntList, powers, dim, True))
    if log:
        return [emit.call(aten.sub.Tensor, moved, emit.call(aten.log.default, total))]
    return [emit.call(aten.div.Tensor, powers, total)]


def _own_labels(emit: Emitter, labels: fx.Node, ignored: int, classes: int) -> fx.Node:
    """Labels of this rank's classes, relative to its first; all others are ignored."""
    moved, own = own_rows(emit, labels, classes)
    used = emit.call(aten.ne.Scalar, labels, ignored)
    return _replaced(emit, emit.call(aten.logical_and.default, own, used), moved, _IGNORED)


def _nll_loss(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    backward = "backward" in str(node.target)
    scores = tensors[1 if backward else 0]
    at = 2 if backward else 1
    reduction, ignored = operands(node)[at + 2], int(operands(node)[at + 3])
    labels = _own_labels(emit, tensors[at], ignored, scores.meta["val"].shape[1])
    if backward:
        args = (tensors[0], scores, labels, None, reduction, _IGNORED, tensors[3])
        return [emit.call(aten.nll_loss_backward.default, *args)]
    built = emit.call(aten.nll_loss_forward.default, scores, labels, None, reduction, _IGNORED)
    return items(emit, built)


def _causal(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    """`is_causal` is replaced by a mask of each rank's own rows; one mask for all layers."""
    backward = "backward" in str(node.target)
    query, key = tensors[1:3] if backward else tensors[:2]
    like, columns = query.meta["val"], key.meta["val"].shape[2]
    asked = "causal mask", like.dtype, like.shape[0], like.shape[2], columns
    if asked not in emit.shared:
        meta, emit.meta = emit.meta, {"phase": emit.meta.get("phase"), "module": ""}
        emit.shared[asked] = _later_hidden(emit, like, columns)
        emit.meta = meta
    count = 6 if backward else 3
    dropout = node.args[count] if len(node.args) > count else 0.0
    kwargs = {**node.kwargs, "attn_mask": emit.shared[asked]}
    built_node = emit.call_with(node.target, (*tensors[:count], dropout, False), kwargs)
    return items(emit, built_node)


def _later_hidden(emit: Emitter, like: torch.Tensor, columns: int) -> fx.Node:
    """The mask that is added to the scores of a rank's queries: -inf where a key is later. It
    contains no floating-point constant, which another axis might want to shard: each rank computes
    it."""
    rows = like.shape[2]
    row = emit.call_with(aten.arange.default, (rows,), {"device": like.device})
    row = emit.call(aten.add.Tensor, row, 0, bind={1: rows})
    column = emit.call_with(aten.arange.default, (columns,), {"device": like.device})
    seen = emit.call(aten.ge.Tensor, emit.call(aten.unsqueeze.default, row, 1), column)
    one = emit.call_with(aten._to_copy.default, (seen,), {"dtype": like.dtype})
    mask = emit.call(aten.log.default, one)  # of 1 and of 0
    return emit.call(aten.expand.default, mask, [like.shape[0], 1, rows, columns])


def _grouped_matmul(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    """Only the rows of this rank's experts."""
    held = tensors[1].meta["val"].shape[0]
    return [emit.call(node.target, *tensors, 0, *node.args[4:], bind={3: held})]


def _expert_gradient(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    count = int(operands(node)[4])
    held = count // emit.ranks
    return [emit.call(node.target, *tensors, 0, count, held, bind={3: held})]


def items(emit: Emitter, node: fx.Node) -> list[fx.Node]:
    """The tensors that a call with several results returns."""
    values = node.meta["val"]
    results = [k for k, v in enumerate(values) if isinstance(v, torch.Tensor)]
    return [emit.call(operator.getitem, node, k) for k in results]


def _dropout(emit: Emitter, node: fx.Node, tensors: list[fx.Node]) -> list[fx.Node]:
    """A separate mask on each rank: `sharding.apply.random_parts`."""
    built = emit.call(DROPOUT_PART, tensors[0], float(operands(node)[1]), 0, bind={2: 1})
    return items(emit, built)


LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        "embedding": _embedding,
        "embedding_backward": _embedding_backward,
        "look_up": _look_up,
        "look_up_backward": _look_up_backward,
        "softmax": _softmax,
        "nll_loss": _nll_loss,
        "causal": _causal,
        "dropout": _dropout,
        "expert_product": _grouped_matmul,
        "expert_gradient": _expert_gradient,
    }
)


def lower(name: str, emit: Emitter, node: fx.Node, tensors: list[Any]) -> list[fx.Node]:
    """The local results of `node`, one per tensor it returns."""
    return LOWERINGS[name](emit, node, tensors)
