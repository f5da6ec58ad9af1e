"""What was captured of one model: a step for each kind of batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphaccel.capture.batch import Batch, batch_leaves, batch_size, sequence_leaves
from graphaccel.capture.batch_dims import given_dims
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.capture.symbols import BATCH, SEQUENCE
from graphaccel.compat.torch import FakeTensorMode, pytree
from graphaccel.conditions import no_collections
from graphaccel.errors import GraphMisuse, Unsupported
from graphaccel.ir.unfold import input_nodes
from graphaccel.model import Model, without_data
from graphaccel.progress import progress


class Captures:
    """Captures a model when a batch asks for it, and remembers what it captured.

    steps: (signature of the batch, training) → step. capturing: whether it does so now. splits:
    whether a step can be split over its batch, where somebody may want to.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.capturing = model, False
        self.steps: dict[Any, StepGraph] = {}
        self.splits: Callable[[StepGraph], bool] | None = None
        self._skeleton: nn.Module | None = None

    def of(self, batch: Batch, *, training: bool = True) -> tuple[StepGraph, dict]:
        """The step for a batch, and the symbol sizes of that batch in it."""
        _refuse_empty(batch, first=not self.steps)
        for (signature, *_), step in self.steps.items():
            sizes = self._fitting(step, batch, training)
            if sizes is not None and _same_values(signature, batch.signature()):
                return step, sizes
        start = time.perf_counter()
        module, made = self._faked(batch)
        modes = {m: m.training for m in module.modules()}
        if module.training != training:
            module.train(training)
        self.capturing = True
        try:
            with torch.enable_grad(), no_collections():
                step = capture(
                    module,
                    made,
                    self.model.loss_fn,
                    batch_dims=self.given_dims(batch),
                    splits=self.splits if training else None,
                )
        finally:
            self.capturing = False
            for m, mode in modes.items():
                m.training = mode
        if step.has_loss and training:
            _refuse_tracked(step)
        self.steps[(batch.signature(), training)] = step
        progress("capture", f"{step.nodes:,} ops", time.perf_counter() - start)
        return step, self._sizes(step, batch)

    def knows(self, batch: Batch) -> bool:
        """Whether the training step of this batch is captured already."""
        return any(
            self._fitting(step, batch, True) is not None
            and _same_values(signature, batch.signature())
            for (signature, *_), step in self.steps.items()
        )

    def keep(self, batch: Batch, step: StepGraph) -> None:
        """Use another rank's capture of the training step of this batch."""
        if self._skeleton is None:  # now: later the model has shards and stand-ins
            self._skeleton = without_data(self.model.module)
        self.steps[(batch.signature(), True)] = step

    def _faked(self, batch: Batch) -> tuple[nn.Module, Batch]:
        """The model and a batch without data: capture then leaves no trace on the user's own."""
        if self._skeleton is None:
            self._skeleton = without_data(self.model.module)
        mode = _mode_of(self._skeleton)
        with mode:
            leaves = tuple(
                torch.empty(
                    x.shape, dtype=x.dtype, device=_real(x.device), requires_grad=x.requires_grad
                )
                if isinstance(x, torch.Tensor)
                else x
                for x in batch.leaves
            )
        return self._skeleton, Batch(leaves, batch.names, batch.spec)

    def given_dims(self, batch: Batch) -> dict[int, int] | None:
        """Leaf → the dim of its examples, where that was said. Raises GraphMisuse (GA407)."""
        said = self.model.batch_dims
        return None if said is None else given_dims(batch, said, self.model.module.forward)

    def _sizes(self, step: StepGraph, batch: Batch) -> dict:
        dims = step.batch_dims
        sizes = {BATCH: batch_size(batch, dims)} if BATCH in step.sizes else {}
        if SEQUENCE in step.sizes:
            sizes[SEQUENCE] = sequence_leaves(batch, dims)[0]
        return sizes

    def _fitting(self, step: StepGraph, batch: Batch, training: bool) -> dict | None:
        """Symbol sizes with which a capture serves this batch, or None."""
        if step.training != training or not _has_dims(batch, step.batch_dims):
            return None
        sizes = self._sizes(step, batch)
        if any((n == 1) != (step.sizes[symbol] == 1) for symbol, n in sizes.items()):
            return None  # a model may treat a size of one apart: squeeze(), broadcasting
        for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
            if spec.kind != "batch":
                continue
            leaf = batch.leaves[spec.leaf] if spec.leaf < len(batch.leaves) else None
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
        return sizes if used == set(batch.tensors) else None


def _same_values(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two batches have the same structure and the same values that are no tensors
    (`return_loss=True`, None), by their signatures: a capture holds for those."""
    plain = [[d for d in described if isinstance(d, str)] for _, described in (one, other)]
    return one[0] == other[0] and plain[0] == plain[1]


def _has_dims(batch: Batch, dims: Mapping[int, int]) -> bool:
    tensors = batch.tensors
    return all(leaf in tensors and tensors[leaf].dim() > dim for leaf, dim in dims.items())


def _refuse_empty(batch: Batch, *, first: bool) -> None:
    """Raises GraphMisuse (GA407) for a batch without examples, whose mean loss is no number.

    first: nothing has been captured yet.
    """
    size, dims = batch_leaves(batch)
    if size == 0:
        name = batch.names[next(iter(dims))]
        shape = list(batch.leaves[next(iter(dims))].shape)
        raise GraphMisuse(
            what=f"the {'first ' * first}batch has no examples: `{name}` has the shape {shape}",
            help_line="graphaccel.optimize(model, optimizer, example_batch=batch)  # one that has"
            if first
            else "leave it out:  DataLoader(dataset, drop_last=True)",
        )


def _refuse_tracked(step: StepGraph) -> None:
    """A gradient of the batch would be lost in silence. Raises Unsupported (GA208)."""
    for spec in step.inputs:
        if spec.tracked:
            raise Unsupported(
                what=f"a gradient of the input `{spec.name}` where the loss is part of the graph",
                reason="gradients are computed when the model is called, those of parameters only",
                help_line="let the script compute the loss:  "
                "graphaccel.optimize(model, optimizer, loss_fn='outside')",
            )


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def _mode_of(module: nn.Module) -> FakeTensorMode:
    return next(iter(pytree.tree_leaves(list(module.parameters())))).fake_mode
