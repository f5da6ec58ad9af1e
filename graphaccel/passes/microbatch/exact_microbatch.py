"""Split the batch over microbatches and the data axis, exactly.

The graph of the whole batch becomes the graph of one part of it: sizes shrink, and the loss and
every gradient become partial sums whose total over the parts is the loss and gradient of the whole
batch, up to rounding. Averaging the means of microbatches differs from that wherever they hold
different numbers of ignored labels: the count that divides the loss is a value of the whole batch.
Such values depend on the batch alone (and on buffers that no step changes, such as class weights)
and move to a prologue that runs once a step.

before (batch 8, two microbatches)              after
  %n: i64[] = aten.sum(%mask)                     %sum_1: i64[] = input   (from the prologue)
  %l: f32[] = aten.div.Tensor(%total, %n)         %l: f32[] = aten.div.Tensor(%total, %sum_1)
  %g: f32[128,32] = aten.mm(...)                  %g: f32[64,32] = aten.mm(...)

Random numbers that all rows share (noise on a weight, one number for a gate) are drawn in the
prologue too: once a step, alike on all ranks.

Where examples mix (a contrastive loss), and over microbatches where a full sum is needed (the
square root of a mean), what follows runs once on the whole batch (`sharding.rules.head`): its nodes
have the size of the whole batch and `meta["head"]`, with `whole_batch` and `batch_part` around it.

Raises SplitRefused (GA207) where that would be most of the model: batch statistics over
microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from graphaccel.capture.export.export import GraphOutput
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, evaluate, with_integers
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.compat.torch.ops import schema
from graphaccel.errors.messages import Location
from graphaccel.ir.calls import draws_by_shape
from graphaccel.ir.fakes import Fakes
from graphaccel.ir.nodes import drop_dead, new_node
from graphaccel.ir.program import Prologue
from graphaccel.ir.values import fake_like, propagate, returned
from graphaccel.passes.microbatch.around_head import Around, sharded_dim
from graphaccel.passes.microbatch.prologue import build_prologue
from graphaccel.passes.microbatch.sections import grows, has_sections, resized
from graphaccel.planner.plan.limits import Limit, Limits
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.rules.batch_placement import (
    PARTIAL,
    REPLICATED,
    WHOLE_SUM,
    BatchPlacement,
    Conflict,
    Placement,
)
from graphaccel.sharding.rules.notation import tensor_arguments
from graphaccel.sharding.rules.propagate import place_batch
from graphaccel.sharding.rules.shard import Shard

aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_COUNTING = {aten.arange.default, aten.arange.start, aten.arange.start_step}


@dataclass(frozen=True)
class LocalStep:
    """The joint graph of one microbatch on one data rank.

    graph: placeholders are those of the StepGraph, then one per prologue output.
    prologue: None when nothing is hoisted. places: placement of each output over the batch.
    headed: whether part of it runs once on the whole batch.
    """

    graph: fx.GraphModule
    prologue: Prologue | None
    output_places: tuple[Any, ...]
    headed: bool = False


def exact_microbatch(
    step: StepGraph,
    plan: Plan,
    sizes: Mapping[sympy.Symbol, int] | None = None,
    fakes: Fakes | None = None,
) -> LocalStep:
    """The step as each of `plan.data * plan.microbatches` equal parts of the batch runs it.

    sizes: of the whole batch that will be passed, where they differ from those captured. fakes: for
    a graph that is measured and not run (`ir.fakes`).
    """
    parts = plan.data * plan.microbatches
    whole = {**step.sizes, **({BATCH: plan.batch} if BATCH in step.sizes else {}), **(sizes or {})}
    if parts == 1:
        placed = BatchPlacement({}, (), (), frozenset(), ())
    else:
        placed = resized(batch_placement(step, over_time=plan.microbatches > 1), step.sizes, whole)
        _refuse_conflicts(step, plan, placed)
    built = _Local(step, plan, placed, whole)
    local = built.build(fakes)
    prologue = build_prologue(step, whole, built.hoisted)
    places = tuple(_place(placed, n) for n in returned(step.graph))
    return LocalStep(local, prologue, places, bool(placed.head))


def batch_placement(step: StepGraph, *, over_time: bool = False) -> BatchPlacement:
    """Where the batch dim goes in a step (`sharding.rules.propagate`); cached."""
    return step.analyses.cached(over_time, _batch_placement, step, over_time)


def _batch_placement(step: StepGraph, over_time: bool) -> BatchPlacement:
    placeholders = [n for n in step.graph.graph.nodes if n.op == "placeholder"]
    pairs = list(zip(placeholders, step.inputs, strict=True))
    batch: dict[str, Placement] = {
        n.name: step.batch_dims[s.leaf]
        for n, s in pairs
        if s.kind == "batch" and s.leaf in step.batch_dims
    }
    results = dict(zip(step.outputs, returned(step.graph), strict=True))
    tangents = {
        n: results[GraphOutput("output", leaf=s.leaf)] for n, s in pairs if s.kind == "tangent"
    }
    batch |= {n.name: d for n in tangents if (d := _batch_dim(n)) is not None}
    written = {o.name for o in step.outputs if o.kind == "buffer"}
    learned = frozenset(
        n.name
        for n, s in pairs
        if s.kind in ("parameter", "tangent") or (s.kind == "buffer" and s.name in written)
    )
    placed = _placed(step, batch, learned, over_time)
    within = {n.name: _place(placed, output) for n, output in tangents.items()}
    within = {name: place for name, place in within.items() if isinstance(place, Shard)}
    if within:  # the gradient of an output is where the output is
        placed = _placed(step, batch := batch | within, learned, over_time)
    odd = [
        Conflict(node, f"output {spec.leaf} of the model is not split as the batch is")
        for n, spec in pairs
        if (node := tangents.get(n)) is not None
        and _mismatch(batch.get(n.name), _place(placed, node))
    ]
    odd += [
        Conflict(node, f"buffer {spec.name} would hold a value of each example")
        for spec, node in results.items()
        if spec.kind == "buffer" and isinstance(_place(placed, node), (int, Shard))
    ]
    odd += [
        Conflict(node, f"in output {spec.leaf} of the model the batch is inside another dim")
        for spec, node in results.items()
        if spec.kind == "output" and not has_sections(node, _place(placed, node), step.sizes)
    ]
    if BATCH in step.sizes:
        odd += [
            Conflict(node, "its dim of the examples has the same size for every batch")
            for node in step.graph.graph.nodes
            if node.op == "call_function" and not grows(node, _place(placed, node))
        ]
    if over_time:
        odd += _gradients_first(placed)
    return replace(placed, conflicts=(*placed.conflicts, *odd))


def _placed(
    step: StepGraph, batch: Mapping[str, Placement], learned: frozenset[str], over_time: bool
) -> BatchPlacement:
    return place_batch(
        step.graph.graph,
        batch,
        BATCH,
        step.sizes.get(BATCH, 1),
        learned,
        over_time=over_time,
        headed=step.has_loss,
    )


def _gradients_first(placed: BatchPlacement) -> list[Conflict]:
    """Nodes of the head, which runs before any backward, that read what a backward computes: a
    gradient goes through an op that has no parts of the batch (`linalg.matrix_exp`)."""
    reason = "in the backward it needs the gradient of the whole batch"
    return [
        Conflict(node, reason)
        for node in sorted(placed.head)
        for read in node.all_input_nodes
        if read not in placed.head
        and read.meta.get("phase") == "backward"
        and _place(placed, read) != REPLICATED
    ]


def split_limits(step: StepGraph) -> Limits:
    """Why the batch cannot be split over microbatches or data ranks, where it cannot.

    If few layers can be split, all of them can; a refusal is stated in the terms of the whole
    model.
    """
    few = step.repeats
    if few is not None and all(split_limits(x) == Limits() for x in (few.short, *few.longer)):
        return Limits()
    placed = batch_placement(step)
    conflicts = [c for c in placed.conflicts if "batch_norm" not in str(c.node.target)]
    data = _limit(step, conflicts[0]) if conflicts else None
    placed = batch_placement(step, over_time=True)
    if placed.conflicts:
        return Limits(_limit(step, placed.conflicts[0]), data)
    whole = (*placed.reduced, *_summed_buffers(step, placed))
    if whole:
        return Limits(_limit(step, Conflict(whole[0], WHOLE_SUM)), data)
    return Limits(None, data, _limit(step, placed.first) if placed.first is not None else None)


def mixes_examples(step: StepGraph) -> bool:
    """Whether some op needs several examples at once, and not only sums of them: in a loss, or
    because examples are along another dim than assumed."""
    few = step if step.repeats is None else step.repeats.short
    return split_limits(step).data is not None or bool(batch_placement(few).head)


def _summed_buffers(step: StepGraph, placed: BatchPlacement) -> tuple[fx.Node, ...]:
    """New values of buffers that are sums over the batch (running statistics)."""
    results = zip(step.outputs, returned(step.graph), strict=True)
    return tuple(n for o, n in results if o.kind == "buffer" and _place(placed, n) == PARTIAL)


def _limit(step: StepGraph, conflict: Conflict) -> Limit:
    node = conflict.node
    line = node.meta.get("location")
    if line is not None and str(line[0]).startswith(_TORCH):
        line = None  # the module path must do
    return Limit(
        str(node.target),
        node.meta.get("module", ""),
        conflict.reason,
        None if line is None else Location(*line),
        outside=not step.has_loss,
    )


def _batch_dim(node: fx.Node) -> int | None:
    """The dim that carries the batch; for an output's tangent it is that of the output."""
    dims = enumerate(node.meta["dims"])
    return next((d for d, n in dims if BATCH in getattr(n, "free_symbols", ())), None)


def _mismatch(tangent: Placement | None, place: Any) -> bool:
    """The gradient of a full or of a partial sum is the same for every part of the batch."""
    return tangent != (place if isinstance(place, (int, Shard)) else None)


def _place(placed: BatchPlacement, node: Any) -> Any:
    """The placement of a result; a value that was converted to the full sum is replicated."""
    if not isinstance(node, fx.Node) or node in placed.hoisted or node in placed.reduced:
        return REPLICATED
    return placed.places.get(node, REPLICATED)


def _refuse_conflicts(step: StepGraph, plan: Plan, placed: BatchPlacement) -> None:
    axis = "microbatches" if plan.microbatches > 1 else "data"
    if placed.conflicts:
        raise _limit(step, placed.conflicts[0]).refused(axis)
    whole = (*placed.reduced, *_summed_buffers(step, placed))
    if whole and plan.microbatches > 1:
        raise _limit(step, Conflict(whole[0], WHOLE_SUM)).refused("microbatches")
    if BATCH not in step.sizes:
        output = step.graph.graph.output_node()
        fixed = Conflict(output, "the model fixes its batch size when it is captured")
        raise _limit(step, fixed).refused("data")
    if placed.first is not None and plan.microbatches > 1 and plan.schedule != "gpipe":
        raise _limit(step, placed.first).refused_schedule(plan.schedule)


class _Local:
    """Copies the joint graph at the size of one part."""

    def __init__(
        self, step: StepGraph, plan: Plan, placed: BatchPlacement, whole: Mapping[sympy.Symbol, int]
    ) -> None:
        self.step, self.placed, self.whole = step, placed, whole
        self.parts = plan.data * plan.microbatches
        self.part = {s: n // self.parts if s == BATCH else n for s, n in whole.items()}
        self.graph = fx.Graph()
        self.map: dict[fx.Node, fx.Node] = {}
        self.hoisted: dict[fx.Node, list[str]] = {}
        self.whole_values: dict[fx.Node, fx.Node] = {}
        nodes = step.graph.graph.find_nodes(op="placeholder")
        kinds = dict(zip(nodes, (s.kind for s in step.inputs), strict=True))
        self.around = Around(self.graph, placed, kinds, self.parts)

    def build(self, fakes: Fakes | None) -> fx.GraphModule:
        nodes = list(self.step.graph.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        inputs, like = [], fake_like if fakes is None else fakes.like
        for node in placeholders:
            self.map[node] = self._placeholder(node.name, node)
            shape = [int(evaluate(d, self.part)) for d in node.meta["dims"]]
            inputs.append(like(node.meta["val"], shape))
        hoisted = self.whole_values
        for node in self.placed.hoisted:
            hoisted[node] = self._placeholder(f"whole_{node.name}", node)
            shape = [int(evaluate(d, self.whole)) for d in node.meta["dims"]]
            inputs.append(like(node.meta["val"], shape))
            self.hoisted[node] = [hoisted[node].name]
            if (place := self.placed.slices.get(node)) is not None:
                inputs.append(like(node.meta["val"], self._part_of_hoisted(node, shape, place)))
        for node in nodes:
            if node.op != "call_function":
                continue
            if node in hoisted and draws_by_shape(node):  # a draw without readers would stay
                self.map[node] = hoisted[node]
                continue
            new = self._call(node)
            self.map[node] = hoisted.get(node, new)
            if node in self.placed.reduced:
                self.map[node] = self._reduced(node, new)
        outputs = self.graph.output(self._outputs())
        outputs.meta["phase"] = "output"
        module = graph_module(self.step.graph, self.graph)
        drop_dead(module.graph)
        if fakes is None:
            module.recompile()
            propagate(module, inputs)
        else:
            fakes.propagate(module.graph, inputs)
        return module

    def _part_of_hoisted(self, node: fx.Node, shape: Sequence[int], place: Any) -> list[int]:
        """A further input: each part's slice of a hoisted value. Returns its shape."""
        dim, outer = sharded_dim(place)
        part = self._placeholder(f"part_{node.name}", node)
        part.meta["slice"] = dim, outer
        self.around.own[node] = part
        self.hoisted[node].append(part.name)
        return [n // self.parts if d == dim else n for d, n in enumerate(shape)]

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = {k: v for k, v in like.meta.items() if k != "val"} | {"phase": "input"}
        return node

    def _call(self, node: fx.Node) -> fx.Node:
        once = node in self.placed.head
        fixed = {
            i: evaluate(expression, self.whole if once or is_quantity(node, i) else self.part)
            for i, expression in node.meta["sizes"].items()
        }
        args, kwargs = with_integers(node, fixed)
        shared = [i for n, i in self.placed.shared if n is node]
        mapped = {n: self._read(n, once) for n in node.all_input_nodes}
        for position in shared:
            source = _nth_tensor(node, position)
            mapped[source] = self._shared(node, mapped[source])
        args, kwargs = _mapped((args, kwargs), mapped)
        meta = {k: v for k, v in node.meta.items() if k not in ("val", "sizes")}
        meta |= {"phase": "backward", "head": True} if once else {}
        return new_node(self.graph, node.op, node.target, args, kwargs, node.name, meta)

    def _read(self, node: fx.Node, once: bool) -> fx.Node:
        """A value as the head reads it, or as a part reads it."""
        if once:
            return self.around.inside(node, self.whole_values.get(node, self.map[node]))
        return self.around.outside(node, self.map[node])

    def _added(self, target: Any, args: tuple, like: fx.Node, reason: str) -> fx.Node:
        new = self.graph.call_function(target, args)
        new.meta = {k: v for k, v in like.meta.items() if k not in ("val", "sizes")}
        new.meta["made_by"] = f"exact_microbatch: {reason}"
        return new

    def _shared(self, user: fx.Node, value: fx.Node) -> fx.Node:
        return self._added(aten.div.Tensor, (value, self.parts), user, "an equal share of a whole")

    def _reduced(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """The sum over data ranks; for a repeated value, taken before it is repeated."""
        ops, reason = torch.ops._c10d_functional, "all-reduce over data"
        repeated = node.target is aten.expand.default
        repeated = repeated and _place(self.placed, node.args[0]) == PARTIAL
        value = new.args[0] if repeated else new
        sent = self._added(ops.all_reduce.default, (value, "sum", "data"), node, reason)
        whole = self._added(ops.wait_tensor.default, (sent,), node, reason)
        if not repeated:
            return whole
        return self._added(aten.expand.default, (whole, *new.args[1:]), node, reason)

    def _outputs(self) -> list[Any]:
        outputs = []
        for node, spec in zip(returned(self.step.graph), self.step.outputs, strict=True):
            new: Any = self.map.get(node, node)
            if spec.kind == "gradient" and node in self.placed.head:
                new = self.around.outside(node, new)
            if spec.kind == "buffer" and self.parts > 1 and _place(self.placed, node) == PARTIAL:
                new = self._reduced(node, new)
            if spec.kind == "gradient" and self.parts > 1 and _place(self.placed, node) != PARTIAL:
                new = self._added(aten.div.Tensor, (new, self.parts), node, "an equal share")
            outputs.append(new)
        return outputs


def _mapped(call: Any, nodes: Mapping[fx.Node, fx.Node]) -> tuple[Any, Any]:
    """A call's (args, kwargs) with its nodes replaced."""
    replaced: Any = map_arg(call, lambda n: nodes[n])
    return replaced


def is_quantity(node: fx.Node, position: int) -> bool:
    """Whether a number of a call, by its position among all, is a quantity (of the whole batch)
    rather than a size (of the part)."""
    if node.target in _COUNTING or not hasattr(node.target, "_schema"):
        return False
    quantities = ("number", "Tensor", "float", "Optional[float]", "Optional[number]")
    seen = 0
    for argument, value in zip(schema(node), node.args, strict=False):
        count = len(integers_in(value))
        if seen <= position < seen + count:
            return str(argument.type) in quantities
        seen += count
    return False


def integers_in(value: Any) -> list[int | float]:
    """The numbers in one argument."""
    collected: list[int | float] = []

    def collect(v: Any) -> Any:
        if isinstance(v, (int, float)) and not isinstance(v, bool):
            collected.append(v)
        return v

    map_aggregate(value, collect)
    return collected


def _nth_tensor(node: fx.Node, position: int) -> fx.Node:
    return tensor_arguments(node)[position]
