"""Which captured steps fit a batch, by its structure and its shapes."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from graphaccel.capture.batch import Batch, has_dims
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.replication.unfold import input_nodes


def sizes_for(step: StepGraph, batch: Batch, training: bool) -> dict[sympy.Symbol, int] | None:
    """Symbolic sizes with which a capture serves this batch, or None."""
    if step.training != training or not has_dims(batch, step.batch_dims):
        return None
    sizes = step.sizes_of(batch)
    if not step.serves(sizes):
        return None
    if any((n == 1) != (step.sizes[symbol] == 1) for symbol, n in sizes.items()):
        return None  # a model may treat a size of one differently: squeeze(), broadcasting
    for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
        if spec.kind != "batch" or spec.leaf >= len(batch.leaves):
            continue
        leaf = batch.leaves[spec.leaf]
        if not isinstance(leaf, torch.Tensor) or batch.names[spec.leaf] != spec.name:
            return None
        if leaf.dtype != node.meta["val"].dtype or leaf.dim() != len(node.meta["dims"]):
            return None
        if training and leaf.requires_grad != spec.tracked:
            return None
        for size, expression in zip(leaf.shape, node.meta["dims"], strict=True):
            wanted = expression if isinstance(expression, int) else expression.subs(sizes)
            if int(wanted) != size:
                return None
    used = {spec.leaf for spec in step.inputs if spec.kind == "batch"}
    return sizes if used >= set(batch.tensors) else None


def same_values(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two batches have the same structure and the same non-tensor values
    (`return_loss=True`, None), by their signatures: a capture is valid for those only."""
    plain = [[d for d in described if isinstance(d, str)] for _, described in (one, other)]
    return one[0] == other[0] and plain[0] == plain[1]
