"""Strategies of ops whose local call needs a rewrite when one of their dims is sharded.

Each names the rewrite that builds the local call (`sharding.apply.lowerings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import fx

from graphaccel.ir.calls import arguments
from graphaccel.kernels.ops.experts import GRADIENT, GROUPED_MATMUL
from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.notation import output_shapes, shape_of, tensor_arguments
from graphaccel.sharding.rules.ops.indexing import takes_rows
from graphaccel.sharding.rules.shard import Row, Shard, Shards

aten = torch.ops.aten


def has_lowering(node: fx.Node) -> bool:
    """Whether a call has strategies beyond its rule, by a rewrite of its own."""
    return node.target in _LOWERED


def lowered_rows(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """The strategies of a call that need a rewrite (`sharding.rules.strategies.rows_of`)."""
    built = _LOWERED.get(node.target)
    if built is not None:
        yield from built(node, ranks, inputs, outputs)


def _embedding(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """Rows of the table are sharded: each rank looks up its own, the rest are zeros.

    Shoeybi et al., Megatron-LM, 2019, §3 (vocabulary-parallel embedding).
    """
    table = shape_of(tensor_arguments(node)[0])
    for rows in _first_dims(inputs[0], table, ranks):
        yield Row((rows, REPLICATED), (PARTIAL,), "embedding", divided=False)


def _embedding_backward(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    for rows in _first_dims(outputs[0], output_shapes(node)[0], ranks):
        if not arguments(node)["scale_grad_by_freq"]:
            yield Row((REPLICATED, REPLICATED), (rows,), "embedding_backward", divided=False)


def _first_dims(known: Shards, shape: Sequence[int], ranks: int) -> list[Shard]:
    """Shards of dim 0: always the even one, a padded one if it is among the known shards."""
    result = {s for s in known if s.dim == 0 and s.padding} | {Shard(0)}
    return [s for s in sorted(result) if s.fits(shape, ranks)]


def _look_up(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """Indexed rows (experts by their tokens) are sharded: each rank returns its own rows, and zeros
    for the rest. Nothing depends on how many a rank has."""
    tensors = tensor_arguments(node)
    floating = tensors[0].meta["val"].is_floating_point()
    if not floating or not takes_rows(node) or not Shard(0).fits(shape_of(tensors[0]), ranks):
        return
    if node.target is aten.index.Tensor:
        yield Row((Shard(0), REPLICATED), (PARTIAL,), "look_up", divided=False)
    else:
        yield Row((None, REPLICATED, REPLICATED), (Shard(0),), "look_up_backward", divided=False)


def _chosen(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """Experts are sharded: each rank multiplies the rows that chose its own experts."""
    _, weights, experts = tensor_arguments(node)
    count = int(arguments(node)["count"])
    backward = node.target is GRADIENT
    shape = output_shapes(node)[0] if backward else shape_of(weights)
    if shape[0] != count or not Shard(0).fits(shape, ranks):  # already sharded over another axis
        return
    own = Shard(0, by=experts.name, experts=count)
    if backward:
        yield Row((own, own, REPLICATED), (Shard(0),), "expert_gradient")
    else:
        yield Row((own, Shard(0), REPLICATED), (own,), "expert_product")


def _softmax_along(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """The dim of a softmax is sharded: its maximum and its sum are reduced over the axis."""
    (shape,) = output_shapes(node)
    dim = int(arguments(node)["dim"]) % len(shape)
    sums = prod(shape) // shape[dim]
    count = len(tensor_arguments(node))
    for shard in sorted(inputs[0] | outputs[0]):
        if shard.dim != dim or shard.by or not shard.fits(shape, ranks):
            continue
        twice = 1 if count == 2 else 2  # a backward needs only a sum
        yield Row((shard,) * count, (shard,), "softmax", gathered=twice * sums)


def _labelled(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """nll_loss with sharded classes: each rank handles the labels among its classes."""
    tensors = tensor_arguments(node)
    if len(tensors) > 2 or arguments(node)["reduction"] == 1:  # class weights; a mean
        return
    scores = shape_of(tensors[0])
    for classes in _classes(inputs[0], scores, ranks):
        yield Row((classes, REPLICATED), (PARTIAL, PARTIAL), "nll_loss", divided=True)


def _classes(known: Shards, scores: Sequence[int], ranks: int) -> list[Shard]:
    if len(scores) != 2:
        return []
    result = {s for s in known if s.dim == 1 and s.padding} | {Shard(1)}
    return [s for s in sorted(result) if s.fits(scores, ranks)]


def _labelled_backward(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    tensors = tensor_arguments(node)
    if len(tensors) > 4 or arguments(node)["reduction"] == 1:
        return
    for classes in _classes(inputs[1] | outputs[0], shape_of(tensors[1]), ranks):
        # The total weight is not read without a mean.
        yield Row((REPLICATED, classes, REPLICATED, None), (classes,), "nll_loss")


def _added_matmul(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """addmm with a sharded inner dim: the added term must be a partial sum."""
    left, right = (shape_of(t) for t in tensor_arguments(node)[1:])
    last, first = len(left) - 1, len(right) - 2
    results = {(s.outer, s.padding) for s in inputs[1] if s.dim == last}
    results |= {(s.outer, s.padding) for s in inputs[2] if s.dim == first}
    for outer, padding in sorted(results):
        split, other = Shard(last, outer, padding), Shard(first, outer, padding)
        if split.fits(left, ranks):
            yield Row((PARTIAL, split, other), (PARTIAL,))


def _causal(
    node: fx.Node, ranks: int, inputs: Sequence[Shards], outputs: Sequence[Shards]
) -> Iterator[Row]:
    """Attention with queries sharded along the sequence, keys and values replicated (context
    parallelism by all-gather: Grattafiori et al., The Llama 3 Herd of Models, 2024, §3.3.2)."""
    tensors = tensor_arguments(node)
    backward = "backward" in str(node.target)
    query = tensors[1 if backward else 0]
    shape = shape_of(query)
    if not Shard(2).fits(shape, ranks):
        return
    known = [Shard(2) in s for s in inputs[:2]] + [Shard(2) in outputs[0]]
    if not any(known):
        return
    given = arguments(node)
    lowering = "causal" if given["is_causal"] else ""
    masks = [
        REPLICATED if shape_of(t)[-2] == 1 else Shard(len(shape_of(t)) - 2)
        for t in tensors[6 if backward else 3 :]
    ]
    split, whole = Shard(2), REPLICATED
    if backward:
        # Each rank has the gradient of keys and values for its own queries: a partial sum.
        inputs_row = (split, split, whole, whole, split, split, *masks)
        yield Row(inputs_row, (split, PARTIAL, PARTIAL), lowering)
    else:
        yield Row((split, whole, whole, *masks), (split, split), lowering)


Lowered: TypeAlias = Callable[[fx.Node, int, Sequence[Shards], Sequence[Shards]], Iterator[Row]]
_LOWERED: Mapping[Any, Lowered] = MappingProxyType(
    {
        aten.embedding.default: _embedding,
        aten.index.Tensor: _look_up,
        aten.index_put.default: _look_up,
        GROUPED_MATMUL: _chosen,
        GRADIENT: _chosen,
        aten.embedding_dense_backward.default: _embedding_backward,
        aten._softmax.default: _softmax_along,
        aten._log_softmax.default: _softmax_along,
        aten._softmax_backward_data.default: _softmax_along,
        aten._log_softmax_backward_data.default: _softmax_along,
        aten.nll_loss_forward.default: _labelled,
        aten.nll_loss_backward.default: _labelled_backward,
        aten.addmm.default: _added_matmul,
        aten._scaled_dot_product_flash_attention_for_cpu.default: _causal,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _causal,
    }
)
