"""Build the prologue of a step: values of the whole batch that are computed once, on every rank.

They are counts that divide a loss, and random numbers that all rows share. A draw reads only the
shape of its tensors, so that a parameter it reads is no input here: it reads an empty tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import evaluate, with_integers
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.calls import draws_by_shape
from graphaccel.ir.program import Prologue, Value
from graphaccel.ir.values import fake_like, propagate

aten = torch.ops.aten


def build_prologue(
    step: StepGraph, whole: Mapping[sympy.Symbol, int], hoisted: Mapping[fx.Node, Sequence[str]]
) -> Prologue | None:
    """The hoisted values, computed from the whole batch. hoisted: the name of each."""
    if not hoisted:
        return None
    needed: set[fx.Node] = set()
    stack = list(hoisted)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [] if draws_by_shape(node) else node.all_input_nodes
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    values: list[Value] = []
    fakes = []
    for node, spec in zip(
        (n for n in step.graph.graph.nodes if n.op == "placeholder"), step.inputs, strict=True
    ):
        if node in needed:
            built[node] = graph.placeholder(node.name)
            values.append(Value(spec.kind, spec.name, leaf=spec.leaf))
            fakes.append(
                fake_like(node.meta["val"], [int(evaluate(d, whole)) for d in node.meta["dims"]])
            )
    for node in step.graph.graph.nodes:
        if node in needed and node.op == "call_function":
            fixed = {i: evaluate(e, whole) for i, e in node.meta["sizes"].items()}
            call: Any = with_integers(node, fixed)
            if draws_by_shape(node):
                shapes = {n: _empty(graph, n, whole) for n in node.all_input_nodes}
                args, kwargs = map_arg(call, shapes.__getitem__)
            else:
                args, kwargs = map_arg(call, built.__getitem__)
            built[node] = graph.call_function(node.target, args, kwargs)
            built[node].meta = {k: v for k, v in node.meta.items() if k not in ("val", "sizes")}
    graph.output([built[n] for n, names in hoisted.items() for _ in names])
    module = graph_module(step.graph, graph)
    propagate(module, fakes)
    return Prologue(module, tuple(values), tuple(n for names in hoisted.values() for n in names))


def _empty(graph: fx.Graph, node: fx.Node, whole: Mapping[sympy.Symbol, int]) -> fx.Node:
    """A tensor like a value, whose elements nobody reads."""
    value, shape = node.meta["val"], [int(evaluate(d, whole)) for d in node.meta["dims"]]
    kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    built = graph.call_function(aten.empty.memory_format, (shape,), kwargs)
    built.meta = {k: v for k, v in node.meta.items() if k not in ("val", "sizes")}
    return built
