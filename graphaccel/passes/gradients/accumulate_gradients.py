"""Accumulate gradients in flat buckets where they are computed; all-reduce each bucket early.

before                                          after (a microbatch in the middle)
  %g: f32[64,32] = aten.mm(%a, %b)                %addmm_: f32[64,32] = aten.addmm_(%acc_w, %a, %b)
  %s: f32[32] = aten.sum(%c, [0])                 %s: f32[32] = aten.sum(%c, [0])
  ...                                             %add_: f32[32] = aten.add_(%acc_b, %s)
  return (%g, %s)                                 return ()

A matmul writes straight into its bucket: the first microbatch with `mm.out`, the later ones with
`addmm_`, so that a weight's gradient never exists beside the bucket. Other gradients are copied by
the first microbatch and added by the later ones, so that buckets need no zeroing. Of a gradient
that is a sum (tied weights) each term is added to the bucket as soon as it is computed. In the last
microbatch an all-reduce over the data axis starts as soon as a bucket is complete; the runtime
waits for it at the end of the step. Gradients are returned as views of the buckets, without a copy.
Li et al., PyTorch Distributed, VLDB 2020, §3.2 (buckets in the order of the backward pass).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.nodes import copy_nodes
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.values import operands, returned
from graphaccel.planner.estimate.gradient_buckets import bucket_limit
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import RESHAPES, TRANSPOSES

aten = torch.ops.aten


def accumulate_gradients(
    program: StageProgram, plan: Plan, partial: Mapping[str, tuple[str, ...]] | None = None
) -> StageProgram:
    """The program with accumulators, or unchanged where one microbatch on one rank needs none.
    With CUDA graphs accumulators are always used: a gradient outlives the memory pool of the
    recording.

    partial: parameter → axes besides data over which its gradient is still a partial sum.
    """
    reduced = _Reduced(plan.data, partial or {})
    summed = any(reduced.over(v.name) for v in program.backward_outputs if v.kind == "gradient")
    if plan.microbatches == 1 and not summed and not plan.cuda_graphs:
        return program
    if not any(v.kind == "gradient" for v in program.backward_outputs):
        return program
    module = program.backwards[(True, True)]
    gradients = _gradients(program, module)
    buckets = _buckets(gradients, plan.bucket_bytes, reduced)
    last = plan.microbatches - 1
    moments = {(m == 0, m == last) for m in range(plan.microbatches)}
    graphs = {
        moment: Accumulation(program, module, gradients, buckets, reduced).build(*moment)
        for moment in moments
    }
    names = [name for bucket in buckets for name in bucket]
    inputs = [Value("accumulator", name) for name in names]
    inputs += [Value("bucket", str(i)) for i, b in enumerate(buckets) if reduced.over(b[0])]
    return replace(
        program,
        backwards=graphs,
        backward_inputs=(*program.backward_inputs, *inputs),
        backward_outputs=tuple(v for v in program.backward_outputs if v.kind != "gradient"),
        buckets=buckets,
    )


@dataclass(frozen=True)
class _Reduced:
    """The axes over which each gradient is summed. data: ranks on the data axis."""

    data: int
    partial: Mapping[str, tuple[str, ...]]

    def over(self, name: str) -> str:
        """`data+tensor`; empty where the backward already gives the full sum."""
        inner = self.partial.get(name, ())
        return "+".join((*(("data",) if self.data > 1 else ()), *inner))


@dataclass(frozen=True)
class _Term:
    """A summand of a gradient. views: from the summand back to the node whose value it shows, each
    without another reader. matmul: that node, if it is a matmul that can write to an `out`
    tensor."""

    node: fx.Node
    views: tuple[fx.Node, ...] = ()
    matmul: fx.Node | None = None

    @property
    def computed_by(self) -> fx.Node:
        """The node that computes the summand."""
        return self.matmul or self.node


@dataclass(frozen=True)
class _Gradient:
    """A parameter's gradient. terms: in the order they are computed. ready: position of the last.
    sums: the additions that accumulating the terms makes superfluous, later ones first."""

    name: str
    node: fx.Node
    terms: tuple[_Term, ...]
    sums: tuple[fx.Node, ...]
    ready: int

    @property
    def value(self) -> torch.Tensor:
        """The fake tensor of the gradient."""
        return self.node.meta["val"]

    @property
    def size(self) -> int:
        """Bytes of the gradient."""
        return self.value.numel() * self.value.element_size()


def _gradients(program: StageProgram, module: fx.GraphModule) -> list[_Gradient]:
    """The stage's gradients, in the order in which they are complete."""
    output = module.graph.output_node()
    built = returned(module)
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    results = []
    for value, node in zip(program.backward_outputs, built, strict=True):
        if value.kind != "gradient":
            continue
        sums: list[fx.Node] = []
        alone = list(node.users) == [output] and list(built).count(node) == 1
        summands = _summands(node, alone, sums)
        terms = sorted((_term(*s) for s in summands), key=lambda term: order[term.computed_by])
        ready = order[terms[-1].computed_by]
        results.append(_Gradient(value.name, node, tuple(terms), tuple(sums), ready))
    return sorted(results, key=lambda g: (g.ready, order[g.node], g.name))


def _summands(node: fx.Node, alone: bool, sums: list[fx.Node]) -> list[tuple[fx.Node, bool]]:
    """The summands of `node`, each with whether nothing else reads it; additions go to `sums`."""
    plain = alone and node.target is aten.add.Tensor and not node.kwargs
    added = operands(node)
    if not plain or added[0] is added[1]:
        return [(node, alone)]
    kind = _kind(node)
    if not all(isinstance(a, fx.Node) and _kind(a) == kind for a in added):
        return [(node, alone)]
    sums.append(node)
    return [s for a in added for s in _summands(a, list(a.users) == [node], sums)]


def _kind(node: fx.Node) -> tuple[Any, Any]:
    return tuple(node.meta["val"].shape), node.meta["val"].dtype


def _term(node: fx.Node, alone: bool) -> _Term:
    views = []
    source = node
    while alone and (source.target in RESHAPES or source.target in TRANSPOSES):
        views.append(source)
        before = operands(source)[0]
        alone = list(before.users) == [source]
        source = before
    if not alone or source.target is not aten.mm.default:
        return _Term(node)
    target = node.meta["val"].new_empty(node.meta["val"].shape)  # as in the bucket: contiguous
    try:
        for view in views:
            target = _undo(view, target)
    except RuntimeError:  # no view of the bucket has the matmul's shape
        return _Term(node)
    return _Term(node, tuple(views), source)


def _undo(view: fx.Node, target: Any, call: Any = None) -> Any:
    """The call on the result of a view that gives back its input: a view of the target."""
    call = call or (lambda op, *args: op(*args))
    if view.target in RESHAPES:
        return call(aten.view.default, target, list(operands(view)[0].meta["val"].shape))
    if view.target is aten.permute.default:
        dims = [d % len(operands(view)[1]) for d in operands(view)[1]]
        return call(aten.permute.default, target, [dims.index(d) for d in range(len(dims))])
    return call(view.target, target, *view.args[1:])


def _buckets(
    gradients: Sequence[_Gradient], size: int, reduced: _Reduced
) -> tuple[tuple[str, ...], ...]:
    """Buckets of at most `size` bytes, or fewer bytes where gradients are few
    (`planner.estimate.gradient_buckets`)."""
    buckets: list[list[str]] = []
    filled: list[int] = []
    filling: dict[Any, int] = {}  # (dtype, axes) → the bucket that is being filled
    size = bucket_limit(size, sum(g.size for g in gradients), scattered=False)
    for gradient in gradients:
        kind = (gradient.value.dtype, reduced.over(gradient.name))
        if kind not in filling or filled[filling[kind]] + gradient.size > size:
            filling[kind] = len(buckets)
            buckets.append([])
            filled.append(0)
        buckets[filling[kind]].append(gradient.name)
        filled[filling[kind]] += gradient.size
    return tuple(tuple(b) for b in buckets)


class Accumulation:
    """Builds the backward graph of one moment of the step: first, middle or last microbatch."""

    def __init__(
        self,
        program: StageProgram,
        module: fx.GraphModule,
        gradients: Sequence[_Gradient],
        buckets: tuple[tuple[str, ...], ...],
        reduced: _Reduced,
    ) -> None:
        self.program, self.module, self.reduced = program, module, reduced
        self.gradients = {g.name: g for g in gradients}
        self.buckets = buckets
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    def build(self, first: bool, last: bool) -> fx.GraphModule:
        """first: write gradients instead of adding them. last: all-reduce complete buckets."""
        graph, built = self.graph, self.copies
        result = copy_nodes(graph, self.module.graph, built)
        anchor = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(anchor):
            accumulators, flats = self._inputs()
        self.start = (*accumulators.values(), *flats.values())[-1]
        self.newest: dict[fx.Node, fx.Node] = {}  # node → the last write after it
        written: dict[str, list[fx.Node]] = {}
        for name, accumulator in accumulators.items():
            gradient = self.gradients[name]
            written[name] = [
                self._write(accumulator, term, first and term is gradient.terms[0])
                for term in gradient.terms
            ]
            for node in gradient.sums:
                graph.erase_node(built[node])
            for term in gradient.terms:
                if term.matmul is not None:
                    for node in (*term.views, term.matmul):
                        graph.erase_node(built[node])
        if last:
            order = {node: i for i, node in enumerate(graph.nodes)}
            for index, flat in flats.items():
                bucket = self.buckets[index]
                newest = max((n for name in bucket for n in written[name]), key=order.__getitem__)
                self.reduce(flat, newest, self.reduced.over(bucket[0]))
        outputs = self.program.backward_outputs
        graph.output([n for n, v in zip(result, outputs, strict=True) if v.kind != "gradient"])
        new = graph_module(self.module, graph)
        new.graph.lint()
        return new

    def _inputs(self) -> tuple[dict[str, fx.Node], dict[int, fx.Node]]:
        """Placeholders: accumulators by parameter name, and by number the buckets that contain them
        and are summed over ranks."""
        accumulators: dict[str, fx.Node] = {}
        for name in (name for bucket in self.buckets for name in bucket):
            gradient = self.gradients[name]
            node = self.graph.placeholder(f"acc_{gradient.node.name}_{len(accumulators)}")
            value = gradient.value
            node.meta = {"val": value.new_empty(value.shape), "phase": "input"}
            accumulators[name] = node
        flats: dict[int, fx.Node] = {}
        for index, bucket in enumerate(self.buckets):
            if self.reduced.over(bucket[0]):
                values = [self.gradients[name].value for name in bucket]
                flats[index] = self.graph.placeholder(f"bucket_{index}")
                count = sum(v.numel() for v in values)
                flats[index].meta = {"val": values[0].new_empty(count), "phase": "input"}
        return accumulators, flats

    def _write(self, accumulator: fx.Node, term: _Term, first: bool) -> fx.Node:
        """Add one summand to the accumulator, right after it is computed."""
        if term.matmul is not None:
            matmul = self.copies[term.matmul]
            with self.graph.inserting_before(matmul):
                target = self._target(accumulator, term)
                if first:
                    node = self.graph.call_function(aten.mm.out, matmul.args, {"out": target})
                else:
                    node = self.graph.call_function(aten.addmm_.default, (target, *matmul.args))
            return self._marked(node, target, matmul)
        value = self.copies[term.node]
        place = self.start if value.op == "placeholder" else value
        # After the writes that exist: the first of a gradient's terms overwrites.
        with self.graph.inserting_after(self.newest.get(place, place)):
            node = self.graph.call_function(
                aten.copy_.default if first else aten.add_.Tensor, (accumulator, value)
            )
        self.newest[place] = node
        return self._marked(node, accumulator, value)

    def _target(self, accumulator: fx.Node, term: _Term) -> fx.Node:
        """The accumulator as a view in the shape of the matmul's result."""

        def call(op: Any, source: fx.Node, *args: Any) -> fx.Node:
            if op is aten.t.default and source.target is op:
                before = operands(source)[0]
                self.graph.erase_node(source)
                return before
            node = self.graph.call_function(op, (source, *args))
            node.meta = {"val": op(source.meta["val"], *args), "phase": "backward"}
            return node

        target = accumulator
        for view in term.views:
            target = _undo(view, target, call)
        return target

    def reduce(self, flat: fx.Node, after: fx.Node, axes: str) -> None:
        """Insert the sum of a bucket over mesh axes."""
        with self.graph.inserting_after(after):
            sent = self.graph.call_function(
                torch.ops._c10d_functional.all_reduce_.default, (flat, "sum", axes)
            )
        self._marked(sent, flat, None)

    def _marked(self, node: fx.Node, written: fx.Node, computed: fx.Node | None) -> fx.Node:
        # A separate call: what the runtime fills in by rank is not among its arguments.
        match = {} if computed is None else computed.meta
        node.meta = {key: value for key, value in match.items() if key != "bind"}
        node.meta |= {"val": written.meta["val"], "made_by": "accumulate_gradients"}
        node.meta["phase"] = "backward"
        return node
