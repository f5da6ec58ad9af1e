"""`StepGraph`: a whole training step as one graph, and `capture`, which builds it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
from torch import fx, nn

from graphaccel.capture.batch import (
    Batch,
    batch_size,
    sequence_leaves,
    size_of,
    without_aliases,
)
from graphaccel.capture.batch_dims import assignments
from graphaccel.capture.differentiate import differentiate, tangent_inputs
from graphaccel.capture.export.export import (
    ForwardGraph,
    GraphInput,
    GraphOutput,
    LossFn,
)
from graphaccel.capture.forward import forward_graph, tied_names
from graphaccel.capture.layers.blocks import Block, block_of, find_blocks
from graphaccel.capture.layers.replicate import (
    repeated_blocks,
    repeated_forward,
    repeated_joint,
    repeated_sizes,
)
from graphaccel.capture.layers.runs import find_runs, prove_repeats, shortened
from graphaccel.capture.other_sizes import at_points, differentiated
from graphaccel.capture.points import Point
from graphaccel.capture.symbols import (
    BATCH,
    SEQUENCE,
    SEQUENCES,
    attach_sizes,
    evaluate,
    fraction_sizes,
    same_structure,
    take_sizes,
)
from graphaccel.capture.trace import Answers
from graphaccel.compat.torch.export import without_stack_traces
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.errors import GraphAccelError
from graphaccel.ir.analysis_cache import AnalysisCache
from graphaccel.ir.replication.layers import KEPT, NotRepeated, Run, among, copies
from graphaccel.ir.replication.unfold import distinct_nodes, input_nodes
from graphaccel.ir.text import graph_text, module_text

log = logging.getLogger("graphaccel.capture")

MANY = 8
"""From this number of identical layers on, few are captured and repeated."""


@dataclass(frozen=True)
class Repeats:
    """A step of many identical layers, as steps of few: short has `ir.replication.repeat.KEPT`
    layers of each run, and each of longer one more of one run. Names are those of the short
    models."""

    runs: tuple[Run, ...]
    short: StepGraph
    longer: tuple[StepGraph, ...]


@dataclass(frozen=True)
class StepGraph:
    """Loss and gradients of one training step, as one functional graph.

    graph: joint graph; placeholders in the order of `inputs`, results in the order of `outputs`.
      Every node carries meta "phase", "origin", "module", "location", "dims" and "sizes"
      (`capture.differentiate`, `capture.symbols`).
    forward: the canonical forward graph it was derived from (fusions are matched here).
    sizes: size of each symbol in this capture: {b: 8, s: 128}; a symbol that is missing is fixed.
    tied: name of every parameter that shares its storage → the name that represents it.
    training: whether the model was in training mode.
    repeats: the captures of few layers from which this one was built, if it was (`others` is then
      empty: `expanded` does for all layers what it did for few).
    analyses: what is computed from it, cached: plans with the same request share the results of
      passes. A copy made by `replace` begins with none.
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
    repeats: Repeats | None = field(default=None, repr=False, compare=False)
    analyses: AnalysisCache = field(
        default_factory=AnalysisCache, init=False, repr=False, compare=False
    )

    @property
    def has_loss(self) -> bool:
        """Whether the loss is part of the graph."""
        return any(o.kind == "loss" for o in self.outputs)

    @property
    def nodes(self) -> int:
        """How many nodes the joint graph has."""
        return sum(count for _, count in distinct_nodes(self.graph)) + 1  # and its output

    @property
    def batch_size(self) -> int:
        """Examples in the captured batch."""
        return self.sizes.get(BATCH, 1)

    def sizes_of(self, batch: Batch) -> dict[sympy.Symbol, int]:
        """The symbols' values for another batch; 0 for a length that it does not have."""
        dims = self.batch_dims
        sizes = {BATCH: batch_size(batch, dims)} if BATCH in self.sizes else {}
        if SEQUENCE in self.sizes:
            sizes[SEQUENCE] = sequence_leaves(batch, dims)[0]
        for symbol in self.sizes.keys() & {*SEQUENCES}:
            sizes[symbol] = next(
                size_of(batch, spec.leaf, dim)
                for node, spec in zip(input_nodes(self.graph), self.inputs, strict=True)
                if spec.kind == "batch"
                for dim, size in enumerate(node.meta["dims"])
                if size == symbol
            )
        return sizes

    def serves(self, sizes: Mapping[sympy.Symbol, int]) -> bool:
        """Whether all its sizes are whole numbers at these: half a length is not at an odd one."""
        return all(isinstance(evaluate(e, sizes), int) for e in self._fractions)

    @cached_property
    def _fractions(self) -> frozenset[sympy.Expr]:
        graph = self.graph if self.repeats is None else self.repeats.short.graph
        return frozenset(e for node in graph.graph.nodes for e in fraction_sizes(node))

    @cached_property
    def positions(self) -> dict[str, int]:
        """Forward-graph node name → its position; nodes that a pass inserted have the position of
        the node they replaced."""
        places: dict[str, int] = {}
        for i, node in enumerate(self.forward.graph.graph.nodes):
            places[node.name] = i
            stands = node.meta.get("stands_for")
            if stands is not None:
                places[stands] = max(i, places.get(stands, i))
            for name in node.meta.get("covers", ()):
                places.setdefault(name, i)
        return places

    def even(self, said: Mapping[str, Any]) -> bool:
        """Whether values given for parameters, by name, are the same in all blocks of a kind."""
        values_of: dict[str, dict[str, Any]] = {block.name: {} for block in self.blocks}
        for name, value in said.items():
            if (block := block_of(name)) in values_of:
                values_of[block][name.removeprefix(block)] = value
        first = {block.kind: values_of[block.name] for block in self.blocks}
        return all(values_of[block.name] == first[block.kind] for block in self.blocks)

    def text(self) -> str:
        """The graph as short text, one line a node, identical in every process."""
        return graph_text(self.graph.graph, notes=True)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the graph: equal for the same model and batch shapes on any machine."""
        return hashlib.sha256(module_text(self.graph).encode()).hexdigest()[:16]


def capture(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn = None,
    *,
    symbolic: bool = True,
    many: int | None = MANY,
    batch_dims: Mapping[int, int] | None = None,
    splits: Callable[[StepGraph], bool] | None = None,
    lengths: int = 1,
) -> StepGraph:
    """Capture one training step of `model` on `batch`; weights are neither read nor changed.

    loss_fn: `loss_fn(output, target)` when the model does not compute its own loss; "outside" when
      the script does, even where the model returns something that looks like a loss.
    symbolic: also capture other batch and sequence sizes, so that sizes are known as expressions.
    many: from this number of identical layers on, few are captured and repeated, with the same
      result (models without data only); None: never.
    batch_dims: leaf → its batch dim. Found where not given: the leading dims, or the first of
      `batch_dims.assignments` with which the capture at another size has the same structure and
      `splits` says yes.
    splits: whether a step can be split over its batch; None where a split is not wanted.
    lengths: how many sequence lengths may vary; a batch that has more is captured with its own.

    Raises: TensorBranch (GA101), CaptureRefused (GA102).
    """
    batch = without_aliases(batch)
    fake = any(isinstance(p, FakeTensor) for p in nn.Module.parameters(model))
    runs = find_runs(model, many) if many is not None and fake else ()
    answers: Answers = {}
    options = [batch_dims] if batch_dims is not None else assignments(batch)
    if not symbolic or (splits is None and len(options[0]) == len(options[-1])):
        options = options[:1]
    first: StepGraph | None = None
    sized: StepGraph | None = None
    for dims in options:
        known = first.forward if first is not None and not runs else None
        varying = lengths if symbolic else None
        step = _with_dims(model, batch, loss_fn, varying, runs, dims, answers, known)
        if not symbolic or ((BATCH in step.sizes or not dims) and (not splits or splits(step))):
            return step
        first = first or step
        if BATCH in step.sizes and (sized is None or len(dims) > len(sized.batch_dims)):
            sized = step
    assert first is not None  # there is at least one option
    return sized or first


def _with_dims(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    varying: int | None,
    runs: tuple[Run, ...],
    dims: Mapping[int, int],
    answers: Answers,
    known: ForwardGraph | None,
) -> StepGraph:
    """The step with these batch dims. varying: how many lengths may vary, None where no size
    may. known: the forward of this batch."""
    if runs:
        try:
            return _repeated(model, batch, loss_fn, varying, runs, dims, answers)
        except (NotRepeated, GraphAccelError) as reason:  # the full model is captured instead
            log.info("all layers are captured: %s", reason)
    return _captured(model, batch, loss_fn, varying, dims, answers, known)


def _captured(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    varying: int | None,
    dims: Mapping[int, int],
    answers: Answers,
    known: ForwardGraph | None = None,
) -> StepGraph:
    """Capture the model without replication of layers."""
    size = batch_size(batch, dims)
    forward = known or forward_graph(model, batch, loss_fn, answers)
    base = {BATCH: size} if dims and size else {}
    others: list[tuple[Point, ForwardGraph]] = []
    if varying is not None and base:
        others = at_points(model, batch, loss_fn, dims, answers, forward, varying)
        base = {point.symbol: point.size for point, _ in others}
    return assemble(
        forward,
        tuple((point.symbol, point.other, other) for point, other in others),
        base,
        dims,
        tied_names(model),
        trained_names(model),
        model.training,
        answers=answers,
    )


def _repeated(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn,
    varying: int | None,
    runs: tuple[Run, ...],
    dims: Mapping[int, int],
    answers: Answers,
) -> StepGraph:
    """Capture the model with few layers of each run, prove that it repeats, and repeat the capture.

    Raises NotRepeated, and what capturing raises.
    """
    prove_repeats(model, batch, loss_fn, runs, KEPT)
    few = shortened(model, dict.fromkeys(runs, KEPT))
    short = _captured(few, batch, loss_fn, varying, dims, answers)
    more = [shortened(model, {r: KEPT + (r is run) for r in runs}) for run in runs]
    with without_stack_traces():
        longer = tuple(_captured(one, batch, loss_fn, None, dims, answers) for one in more)
    return expanded(Repeats(runs, short, longer), tied_names(model), trained_names(model))


def expanded(repeats: Repeats, tied: Mapping[str, str], trainable: frozenset[str]) -> StepGraph:
    """The step of all layers: names, sizes and blocks are those that a capture of all of them has.

    tied, trainable: of the full model. Raises NotRepeated.
    """
    runs, short, longer = repeats.runs, repeats.short, repeats.longer
    graph, inputs, outputs = repeated_joint(
        runs,
        (short.graph, short.inputs, short.outputs),
        [(s.graph, s.inputs, s.outputs) for s in longer],
    )
    return replace(
        short,
        graph=graph,
        inputs=inputs,
        outputs=outputs,
        forward=repeated_forward(runs, short.forward, [s.forward for s in longer]),
        others=(),
        blocks=repeated_blocks(runs, short.blocks),
        tied=tied,
        trainable=trainable,
        repeats=Repeats(runs, short, tuple(replace(s, sizes=short.sizes) for s in longer)),
    )


def of_layers(step: StepGraph, counts: Sequence[int]) -> StepGraph:
    """The step with `counts` layers of each of its runs. Raises NotRepeated."""
    assert step.repeats is not None
    return step.analyses.cached(tuple(counts), _of_layers, step.repeats, counts)


def _of_layers(few: Repeats, counts: Sequence[int]) -> StepGraph:
    runs = among(few.runs, counts)
    short = few.short
    tied = {
        name: stands
        for pair in short.tied.items()
        for name, stands in zip(*(copies(runs, n) for n in pair), strict=False)
    }
    trainable = frozenset(n for name in short.trainable for n in copies(runs, name))
    return expanded(replace(few, runs=runs), tied, trainable)


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
    before: fx.GraphModule | None = None,
    answers: Answers | None = None,
) -> StepGraph:
    """Differentiate a forward graph (as captured, or rewritten) and compute sizes and blocks.

    before: the joint graph of what was rewritten. Where the new one is the same except for casts,
    its sizes are known, and the other captures need not be differentiated. answers: see
    `differentiate`."""
    joint, outputs = differentiate(forward, trainable, scaled=scaled, answers=answers)
    known = dict(sizes)
    if before is None or not take_sizes(joint, before):
        points = [
            (symbol, size, other_joint)
            for symbol, size, other in others
            if (other_joint := differentiated(other, trainable, scaled, answers)) is not None
        ]
        kept = [p for p in points if same_structure(joint, p[2], p[1] / sizes[p[0]])]
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
    """The step with each of its forward graphs rewritten, and differentiated anew."""
    answers: Answers = {}
    return of_few(
        step,
        lambda few: assemble(
            rewrite(few.forward),
            tuple((symbol, size, rewrite(other)) for symbol, size, other in few.others),
            few.sizes,
            few.batch_dims,
            few.tied,
            few.trainable,
            few.training,
            scaled=scaled,
            before=few.graph,
            answers=answers,
        ),
    )


def of_few(step: StepGraph, make: Callable[[StepGraph], StepGraph]) -> StepGraph:
    """The result of `make` on a step; for a step that repeats, its results on few layers, repeated.

    make: depends only on the graphs; returns its argument where it changes nothing.
    """
    few = step.repeats
    if few is None:
        return make(step)
    short, longer = make(few.short), tuple(map(make, few.longer))
    if short is few.short and all(a is b for a, b in zip(longer, few.longer, strict=True)):
        return step
    trainable = step.trainable if short.trainable else short.trainable
    try:
        return expanded(Repeats(few.runs, short, longer), step.tied, trainable)
    except NotRepeated as reason:
        log.info("all layers are rewritten: %s", reason)
        return make(replace(step, others=_all_others(few), repeats=None))


def _all_others(repeats: Repeats) -> tuple[tuple[sympy.Symbol, int, ForwardGraph], ...]:
    """The captures at other sizes, of all layers."""
    short = repeats.short
    longer = [s.forward for s in repeats.longer]
    graphs = [graph for _, _, graph in short.others]
    built = repeated_sizes(repeats.runs, short.forward, longer, graphs)
    return tuple((s, n, g) for (s, n, _), g in zip(short.others, built, strict=True))


def trained_names(model: nn.Module) -> frozenset[str]:
    """Every name of the parameters that require a gradient now."""
    return frozenset(
        n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    )
