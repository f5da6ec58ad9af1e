"""Refuses what a batch holds and a model does not take, on every rank alike, before a step
communicates.

An index that a table does not have raises an IndexError in eager code. Under a plan only the rank
with the table would raise it, and the others would wait for it; where the table is sharded over its
rows nothing would be raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from graphaccel.capture.batch import Batch, batch_leaves
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import evaluate, with_integers
from graphaccel.errors import BatchChanged, GraphMisuse, Unsupported
from graphaccel.errors.messages import Location
from graphaccel.ir.replication.unfold import input_nodes

aten = torch.ops.aten
_SAME_VALUES = {
    aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default,
    aten.reshape.default, aten.squeeze.dim, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.view.default, aten._to_copy.default,
}  # fmt: skip

_CROSS_ENTROPIES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


@dataclass(frozen=True)
class _Table:
    """A lookup: the parameter's name, its number of rows, and the script's line."""

    name: str
    rows: int
    location: Location | None

    def refuse(self, given: str, result: int) -> None:
        """Raises GraphMisuse (GA407) for an index that is not one of a row."""
        if not 0 <= result < self.rows:
            raise GraphMisuse(
                what=f"{given} {result}, and `{self.name}` has rows 0 to {self.rows - 1}",
                location=self.location,
                help_line="give the table more rows, or leave such a batch out",
            )


def refuse_empty(batch: Batch, *, first: bool) -> None:
    """Raises GraphMisuse (GA407) for a batch without examples, whose mean loss is NaN.

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


def check_indices(step: StepGraph, batch: Batch, *, first: bool = False) -> None:
    """Check the inputs on the host that the forward looks up in a table as they are, and the labels
    of a cross entropy.

    first: of the first batch labels on a device are read, too, where a wrong one would end the
    process without a name.

    Raises GraphMisuse (GA407).
    """
    given = dict(zip(batch.names, batch.leaves, strict=True))
    for name, table in _looked_up(step).items():
        tensor = given.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int64, torch.int32):
            continue
        if tensor.device.type == "cpu" and tensor.numel():
            for result in tensor.aminmax():
                table.refuse(f"`{name}` holds", int(result))
    _check_labels(step, batch, first=first)


def _check_labels(step: StepGraph, batch: Batch, *, first: bool) -> None:
    few = step if step.repeats is None else step.repeats.short
    losses = few.analyses.cached((), _losses, few)
    if not losses:
        return
    sizes: dict[sympy.Symbol, int] = {}
    leaves: dict[fx.Node, torch.Tensor | None] = {}
    names: dict[fx.Node, str] = {}
    given = dict(zip(batch.names, batch.leaves, strict=True))
    for node, spec in zip(input_nodes(few.graph), few.inputs, strict=True):
        leaf = given.get(spec.name) if spec.kind == "batch" else None
        if isinstance(leaf, torch.Tensor):
            pairs = zip(node.meta["dims"], leaf.shape, strict=False)
            sizes |= {dim: size for dim, size in pairs if isinstance(dim, sympy.Symbol)}
            names[node] = spec.name
            if leaf.dtype == torch.int64 and (first or leaf.device.type == "cpu"):
                leaves[node] = leaf.detach().cpu()
    for loss in losses:
        labels = _value(loss.labels, {**few.sizes, **sizes}, leaves)
        if labels is None:
            continue
        wrong = (labels != loss.ignored) & ((labels < 0) | (labels >= loss.classes))
        if bool(wrong.any()):
            raise GraphMisuse(
                what=f"`{_named(loss.labels, names)}` holds the label {int(labels[wrong][0])}, and "
                f"the loss has classes 0 to {loss.classes - 1}",
                location=loss.location,
                help_line="give the model as many classes, or mend the labels"
                f" ({loss.ignored} is ignored)",
            )


@dataclass(frozen=True)
class _Loss:
    """A cross entropy: its labels, its number of classes, and the label that adds nothing."""

    labels: fx.Node
    classes: int
    ignored: int
    location: Location | None


def _losses(step: StepGraph) -> tuple[_Loss, ...]:
    """The cross entropies of the forward, in whose labels no float is read."""
    results = []
    for node in step.graph.graph.nodes:
        if node.target not in _CROSS_ENTROPIES or node.meta.get("phase") != "forward":
            continue
        scores, labels, _, _, ignored = node.args
        dims, line = scores.meta["dims"], node.meta.get("location")
        classes = dims[1] if len(dims) > 1 else dims[0]
        if isinstance(classes, (int, sympy.Integer)):
            place = None if line is None else Location(*line)
            results.append(_Loss(labels, int(classes), ignored, place))
    return tuple(results)


def _named(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The input that a value is made of."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        one = waiting.pop()
        if one in names:
            return names[one]
        seen.add(one)
        waiting += [each for each in one.all_input_nodes if each not in seen]
    return str(node)


def check_positions(step: StepGraph, sizes: Mapping[sympy.Symbol, int]) -> None:
    """Check indices that depend on the sizes of a batch alone: positions in a sequence.

    Raises GraphMisuse (GA407).
    """
    few = step if step.repeats is None else step.repeats.short
    for node, table in _lookups(few):
        index = _value(node.args[1], {**few.sizes, **sizes}, {})  # type: ignore[arg-type]
        if index is not None and index.numel():
            for result in index.aminmax():
                table.refuse("a sequence of this batch has the position", int(result))


def shape_changed(step: StepGraph, batch: Batch) -> BatchChanged | None:
    """How an input's shape differs from what the step was captured with, in a dim that is neither
    batch nor sequence."""
    for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
        if spec.kind != "batch" or spec.name not in batch.names:
            continue
        leaf, dims = batch.leaves[batch.names.index(spec.name)], node.meta["dims"]
        if not isinstance(leaf, torch.Tensor):
            continue
        pairs = zip(dims, leaf.shape, strict=False)
        if len(dims) != leaf.dim() or any(isinstance(d, int) and d != n for d, n in pairs):
            return BatchChanged(
                what=f"shape of `{spec.name}`",
                expected=f"[{', '.join(map(str, dims))}]",
                got=str(list(leaf.shape)),
            )
    return None


def _looked_up(step: StepGraph) -> dict[str, _Table]:
    """Input of the model → the smallest table that it is looked up in; cached."""
    few = step if step.repeats is None else step.repeats.short
    return few.analyses.cached((), _smallest_tables, few)


def _smallest_tables(step: StepGraph) -> dict[str, _Table]:
    specs = dict(zip(step.graph.graph.find_nodes(op="placeholder"), step.inputs, strict=True))
    smallest: dict[str, _Table] = {}
    for node, table in _lookups(step):
        source = node.args[1]
        while isinstance(source, fx.Node) and source.target in _SAME_VALUES:
            source = source.args[0]
        spec = specs.get(source)  # type: ignore[arg-type]
        if spec is None or spec.kind != "batch":
            continue
        known = smallest.get(spec.name)
        if known is None or table.rows < known.rows:
            smallest[spec.name] = table
    return smallest


def _lookups(step: StepGraph) -> list[tuple[fx.Node, _Table]]:
    """Embeddings of the forward whose table is a parameter or a buffer."""
    specs = dict(zip(step.graph.graph.find_nodes(op="placeholder"), step.inputs, strict=True))
    results = []
    for node in step.graph.graph.find_nodes(
        op="call_function", target=aten.embedding.default, sort=True
    ):
        spec = specs.get(node.args[0])  # type: ignore[arg-type]
        if node.meta.get("phase") == "forward" and spec is not None:
            line = node.meta.get("location")
            rows = int(node.all_input_nodes[0].meta["dims"][0])
            results.append(
                (node, _Table(spec.name, rows, None if line is None else Location(*line)))
            )
    return results


def _is_known(node: fx.Node) -> bool:
    """Whether an op gives whole numbers or masks, the same every time."""
    target: Any = node.target
    value = node.meta.get("val")
    kinds = (torch.int64, torch.int32, torch.bool)
    whole = isinstance(value, torch.Tensor) and value.dtype in kinds
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return whole and not draws and getattr(target, "namespace", "") == "aten"


def _value(
    node: fx.Node, sizes: Mapping[sympy.Symbol, int], known: dict[fx.Node, torch.Tensor | None]
) -> torch.Tensor | None:
    """The values of an integer tensor that depends on nothing but what is `known`, else None."""
    if node in known:
        return known[node]
    known[node] = None
    if node.op != "call_function" or not _is_known(node):
        return None
    values = {n: _value(n, sizes, known) for n in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    fixed = {i: evaluate(e, sizes) for i, e in node.meta.get("sizes", {}).items()}
    args, kwargs = with_integers(node, fixed)
    args, kwargs = fx.node.map_arg((args, kwargs), lambda n: values[n])  # type: ignore[misc]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def refuse_untrained(step: StepGraph) -> None:
    """Raises Unsupported (GA208) for a training step that would lose a gradient of the batch, or
    that trains nothing, which is a mistake."""
    for spec in step.inputs:
        if spec.tracked:
            raise Unsupported(
                what=f"a gradient of the input `{spec.name}` where the loss is part of the graph",
                reason="gradients are computed when the model is called, those of parameters only",
                help_line="let the script compute the loss:  "
                "graphaccel.optimize(model, optimizer, loss_fn='outside')",
            )
    if step.trainable and not any(spec.kind == "gradient" for spec in step.outputs):
        raise Unsupported(
            what="a training step in which no parameter gets a gradient",
            reason="the loss depends on no trained parameter, or only through ops whose gradient "
            "is zero everywhere",
            help_line="take away what has no gradient between parameters and loss: .detach(), "
            "torch.no_grad(), argmax",
            other_help="or call a forward that is not to train so:  "
            "with torch.no_grad(): output = model(batch)",
        )
