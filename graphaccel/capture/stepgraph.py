"""`StepGraph`: a whole training step as one graph, and `capture`, which makes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy
from torch import fx, nn

from graphaccel.capture.batch import Batch, batch_leaves, resized, sequence_leaves, without_aliases
from graphaccel.capture.blocks import Block, find_blocks
from graphaccel.capture.canonical import canonicalise
from graphaccel.capture.differentiate import differentiate, tangent_inputs
from graphaccel.capture.export import (
    ForwardGraph,
    GraphInput,
    GraphOutput,
    LossFn,
    export_forward,
)
from graphaccel.capture.symbols import BATCH, SEQUENCE, attach_sizes, same_structure
from graphaccel.compat.torch import fake_mode_of
from graphaccel.ir.text import graph_text


@dataclass(frozen=True)
class StepGraph:
    """Loss and gradients of one training step, as one functional graph.

    graph: joint graph; placeholders in the order of `inputs`, results in the order of `outputs`.
      Every node carries meta "phase", "origin", "module", "location", "dims" and "sizes"
      (`capture.differentiate`, `capture.symbols`).
    forward: the canonical forward graph it was derived from (fusions match here).
    sizes: size of each symbol in this capture: {b: 8, s: 128}; a symbol that is missing is fixed.
    tied: name of every parameter that shares its storage → the name that stands for it.
    training: whether the model was in training mode.
    derived: steps that passes made of this one, by the pass and what it was asked for, so that
      plans that ask the same share them.
    """

    graph: fx.GraphModule = field(repr=False)
    inputs: tuple[GraphInput, ...] = field(repr=False)
    outputs: tuple[GraphOutput, ...] = field(repr=False)
    forward: ForwardGraph = field(repr=False)
    others: tuple[tuple[sympy.Symbol, int, ForwardGraph], ...] = field(repr=False)
    batch_dims: Mapping[int, int] = field(repr=False)
    sizes: Mapping[sympy.Symbol, int]
    blocks: tuple[Block, ...] = field(repr=False)
    tied: Mapping[str, str] = field(repr=False)
    trainable: frozenset[str] = field(repr=False)
    training: bool = True
    derived: dict[object, StepGraph] = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_loss(self) -> bool:
        """Whether the loss is part of the graph."""
        return any(o.kind == "loss" for o in self.outputs)

    @property
    def batch_size(self) -> int:
        """Examples in the captured batch."""
        return self.sizes.get(BATCH, 1)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Forward-graph node name → its place; what a pass made stands where the node it replaced
        stood."""
        places: dict[str, int] = {}
        for i, node in enumerate(self.forward.graph.graph.nodes):
            places[node.name] = i
            stands = node.meta.get("stands_for")
            if stands is not None:
                places[stands] = max(i, places.get(stands, i))
            for name in node.meta.get("covers", ()):
                places.setdefault(name, i)
        return places

    def text(self) -> str:
        """The graph as short text, one line a node, the same in every process."""
        return graph_text(self.graph.graph, notes=True)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the graph: equal for the same model and batch shapes on any machine."""
        return hashlib.sha256(graph_text(self.graph.graph).encode()).hexdigest()[:16]


def capture(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn = None,
    *,
    symbolic: bool = True,
) -> StepGraph:
    """Capture one training step of `model` on `batch`; no weight is read and none is changed.

    loss_fn: `loss_fn(output, target)` when the model does not compute its own loss; "outside" when
      the script does, even where the model returns something that looks like a loss.
    symbolic: also capture other batch and sequence sizes, so that sizes are known as expressions.

    Raises: TensorBranch (GA101), CaptureRefused (GA102).
    """
    trainable = frozenset(
        n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    )
    batch = without_aliases(batch)
    size, dims = batch_leaves(batch)
    if size == 1 and symbolic and dims:  # a size of one is special to export: capture at two
        batch, size = resized(batch, dims, 2), 2
    forward = _forward(model, batch, loss_fn)
    base = {BATCH: size} if dims else {}
    others: list[tuple[sympy.Symbol, int, ForwardGraph]] = []
    if symbolic and dims:
        length, sequence = sequence_leaves(batch, dims)
        wanted = [(BATCH, size + 2, dims)]
        if length >= 4:
            base[SEQUENCE] = length
            wanted.append((SEQUENCE, length // 2, sequence))
        for symbol, other, where in wanted:
            variant = _variant(model, batch, loss_fn, where, other)
            if variant is not None and same_structure(forward.graph, variant.graph):
                others.append((symbol, other, variant))
            else:
                base.pop(symbol)
    return assemble(forward, tuple(others), base, dims, _tied(model), trainable, model.training)


def assemble(
    forward: ForwardGraph,
    others: tuple[tuple[sympy.Symbol, int, ForwardGraph], ...],
    sizes: Mapping[sympy.Symbol, int],
    batch_dims: Mapping[int, int],
    tied: Mapping[str, str],
    trainable: frozenset[str],
    training: bool,
    *,
    scaled: bool = False,
) -> StepGraph:
    """Differentiate a forward graph (as captured, or rewritten) and find sizes and blocks."""
    joint, outputs = differentiate(forward, trainable, scaled=scaled)
    points = [
        (symbol, size, differentiate(other, trainable, scaled=scaled)[0])
        for symbol, size, other in others
    ]
    kept = [(s, n, g) for s, n, g in points if same_structure(joint, g)]
    known = {s: n for s, n in sizes.items() if s in {s for s, _, _ in kept}}
    attach_sizes(joint, known, kept)
    return StepGraph(
        graph=joint,
        inputs=forward.inputs + tangent_inputs(forward, trainable, scaled=scaled),
        outputs=outputs,
        forward=forward,
        others=others,
        batch_dims=batch_dims,
        sizes=known,
        blocks=find_blocks(joint),
        tied=tied,
        trainable=trainable,
        training=training,
    )


def rewritten(
    step: StepGraph, rewrite: Callable[[ForwardGraph], ForwardGraph], *, scaled: bool
) -> StepGraph:
    """The step with each of its forward graphs rewritten, and differentiated again."""
    return assemble(
        rewrite(step.forward),
        tuple((symbol, size, rewrite(other)) for symbol, size, other in step.others),
        step.sizes,
        step.batch_dims,
        step.tied,
        step.trainable,
        step.training,
        scaled=scaled,
    )


def _forward(model: nn.Module, batch: Batch, loss_fn: LossFn) -> ForwardGraph:
    tied = _tied(model)
    forward = export_forward(model, batch, loss_fn)
    forward = _merged(forward, tied)
    with fake_mode_of([n for n in forward.graph.graph.nodes if n.op == "placeholder"]):
        canonicalise(forward.graph)
    return forward


def _merged(forward: ForwardGraph, tied: Mapping[str, str]) -> ForwardGraph:
    """Tied parameters under one name and one placeholder: their gradient is one gradient."""
    first: dict[str, fx.Node] = {}
    kept = []
    placeholders = [n for n in forward.graph.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, forward.inputs, strict=True):
        name = tied.get(spec.name, spec.name)
        if spec.kind == "parameter" and name in first:
            node.replace_all_uses_with(first[name])
            forward.graph.graph.erase_node(node)
            continue
        if spec.kind == "parameter":
            first[name] = node
        kept.append(replace(spec, name=name))
    return replace(forward, inputs=tuple(kept))


def _variant(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    dims: Mapping[int, int],
    size: int,
) -> ForwardGraph | None:
    """The same capture at another size, or None where the model does not allow that size."""
    try:
        return _forward(model, resized(batch, dims, size), loss_fn)
    except Exception:  # any refusal means the same: this size is fixed
        return None


def _tied(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stands = first.setdefault(id(parameter), name)
        if stands != name:
            tied[name] = stands
    return tied
