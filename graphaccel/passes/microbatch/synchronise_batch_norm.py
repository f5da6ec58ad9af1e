"""Synchronised batch norm: statistics of the whole batch when the data axis splits it.

before                                            after
  %o = _native_batch_norm_legit_functional(%x,…)    %t: f32[16] = aten.sum.dim_IntList(%x, [0,2,3])
                                                    %m: f32[16] = aten.div.Tensor(%t, 8192)
                                                    ... (variance, affine, running statistics)

Only sums over the batch remain, so that `exact_microbatch` turns them into partial sums with an
all-reduce where the total is read, and autograd does the same for their gradients. Ioffe and
Szegedy, Batch Normalization, 2015, §3; the variance is computed about the mean (two passes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.capture.export.export import ForwardGraph
from graphaccel.capture.stepgraph import StepGraph, rewritten
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.replication.unfold import distinct_nodes
from graphaccel.ir.values import operands
from graphaccel.planner.plan.plan import Plan

aten = torch.ops.aten
_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_NO_STATISTICS = aten._native_batch_norm_legit.no_stats
"""Of a norm that keeps none: `track_running_stats=False`."""


def synchronise_batch_norm(step: StepGraph, plan: Plan) -> StepGraph:
    """The step with batch norm decomposed into sums, where more than one data rank needs it."""
    if plan.data == 1 or not any(_is_batch_norm(n) for n, _ in distinct_nodes(step.forward.graph)):
        return step
    return rewritten(step, _spelled, scaled=plan.precision.scaled)


def _spelled(forward: ForwardGraph) -> ForwardGraph:
    graph = fx.Graph()
    output = graph.graph_copy(forward.graph.graph, {})
    graph.output(output)
    module = graph_module(forward.graph, graph)
    mode = fake_mode_of([n for n in graph.nodes if n.op == "placeholder"])
    with mode:
        for node in list(graph.nodes):
            if _is_batch_norm(node):
                _spell(node)
    graph.lint()
    module.recompile()
    return replace(forward, graph=module)


def _is_batch_norm(node: fx.Node) -> bool:
    """Not an instance norm, which is one over the channels of all examples, in one row."""
    if node.target is not _NO_STATISTICS:
        return node.target is _BATCH_NORM
    return bool(operands(node)[0].meta["val"].shape[0] > 1)


def _spell(node: fx.Node) -> None:
    x, weight, bias, *running, training, momentum, epsilon = operands(node)
    if not training:
        return
    shape = tuple(x.meta["val"].shape)
    dims = [d for d in range(len(shape)) if d != 1]
    count = x.meta["val"].numel() // shape[1]
    spread = [1, shape[1], *[1] * (len(shape) - 2)]
    emit = _emitter(node)

    mean = emit(aten.div.Tensor, emit(aten.sum.dim_IntList, x, dims), count)
    centred = emit(aten.sub.Tensor, x, emit(aten.reshape.default, mean, spread))
    square = emit(aten.mul.Tensor, centred, centred)
    total = emit(aten.sum.dim_IntList, square, dims)
    variance = emit(aten.div.Tensor, total, count)
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, epsilon))
    result = emit(aten.mul.Tensor, centred, emit(aten.reshape.default, scale, spread))
    if weight is not None:
        result = emit(aten.mul.Tensor, result, emit(aten.reshape.default, weight, spread))
    if bias is not None:
        result = emit(aten.add.Tensor, result, emit(aten.reshape.default, bias, spread))
    statistics = []
    unbiased = emit(aten.div.Tensor, total, count - 1) if running else None
    for old, new in zip(running, (mean, unbiased), strict=False):
        kept = emit(aten.mul.Tensor, old, 1 - momentum)
        fresh = emit(aten.mul.Tensor, emit(aten.detach.default, new), momentum)
        statistics.append(emit(aten.add.Tensor, kept, fresh))
    results = (result, mean, scale, *statistics)
    for user in list(node.users):
        results[operands(user)[1]].meta["stands_for"] = user.name  # a cut may name it
        user.replace_all_uses_with(results[operands(user)[1]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _emitter(node: fx.Node) -> Callable[..., fx.Node]:
    """A function that inserts calls before `node`, with its provenance, stage name and fake
    values."""

    def emit(target: Any, *args: Any) -> fx.Node:
        with node.graph.inserting_before(node):
            new = node.graph.call_function(target, args)
        new.meta = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
        new.meta["made_by"] = "synchronise_batch_norm"
        new.meta["stands_for"] = node.meta.get("stands_for", node.name)
        values: Any = map_arg(args, lambda n: n.meta["val"])
        new.meta["val"] = target(*values)
        return new

    return emit
