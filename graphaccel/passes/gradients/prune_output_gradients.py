"""Remove from a backward the gradients of model outputs that the loss does not read.

before (two heads; the loss reads the first)      after
  %a: f32[8,32] = aten.mm(%g_output_0, %w_0)        %a: f32[8,32] = aten.mm(%g_output_0, %w_0)
  %b: f32[8,32] = aten.mm(%g_output_1, %w_1)        %d: f32[32,8] = aten.mm(%t, %a)
  %c: f32[8,32] = aten.add.Tensor(%a, %b)           return (%d)
  %d: f32[32,8] = aten.mm(%t, %c)
  return (%d, %e)   # %e: gradient of %w_1

A backward is linear in the gradients of the outputs: a node that depends on nothing but zero
gradients is zero itself, and is never computed. A parameter whose gradient is zero in this sense
has none, as in eager mode: its `.grad` stays None, and an optimizer skips it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.program import StageProgram
from graphaccel.ir.values import returned

aten = torch.ops.aten
_GRADIENTS = ("gradient", "input_gradient")
_DONE = {"val", "phase", "origin", "module", "location"}


def prune_output_gradients(program: StageProgram, used: frozenset[int]) -> StageProgram:
    """The stage with a backward for the gradients of the output leaves `used` alone.

    program: without accumulators. The forward, and what it saves, do not change.
    """
    module = program.backwards[(True, True)]
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    specs = list(zip(placeholders, program.backward_inputs, strict=True))
    tangents = {n for n, v in specs if v.kind == "tangent"}
    zero: set[fx.Node] = {n for n, v in specs if v.kind == "tangent" and v.leaf not in used}
    linear = set(tangents)  # what depends on the gradient of an output
    graph = fx.Graph()
    built: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if node not in zero:
                built[node] = graph.node_copy(node)
        elif node.op == "call_function":
            above = [n for n in node.all_input_nodes if n in linear]
            if above:
                linear.add(node)
            if above and all(n in zero for n in above):
                zero.add(node)
            else:
                built[node] = _copied(graph, node, zero, built)
    results = zip(returned(module), program.backward_outputs, strict=True)
    kept = [(n, v) for n, v in results if v.kind not in _GRADIENTS or n not in zero]
    graph.output([_value(graph, n, zero, built) for n, _ in kept]).meta["phase"] = "output"
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    inputs = [(built[n], v) for n, v in specs if n in built]
    for node, _ in inputs:  # the forward saved it nevertheless
        if not node.users:
            graph.erase_node(node)
    result = graph_module(module, graph)
    return replace(
        program,
        backwards={(True, True): result},
        backward_inputs=tuple(v for n, v in inputs if n.users),
        backward_outputs=tuple(v for _, v in kept),
    )


def _copied(
    graph: fx.Graph, node: fx.Node, zero: set[fx.Node], built: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """The node without the zeros among its summands."""
    if node.target is aten.add.Tensor and not node.kwargs:
        terms = [n for n in node.args if isinstance(n, fx.Node)]
        rest = [n for n in terms if n not in zero]
        if len(terms) == 2 and len(rest) == 1 and _same(rest[0], node):
            return built[rest[0]]
    return graph.node_copy(node, lambda n: _value(graph, n, zero, built))


def _value(
    graph: fx.Graph, node: fx.Node, zero: set[fx.Node], built: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    if node not in zero:
        return built[node]
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} gives several gradients, all of them zero"
    new = graph.call_function(
        aten.zeros.default,
        (list(value.shape),),
        {"dtype": value.dtype, "device": value.device},
    )
    new.meta = {k: v for k, v in node.meta.items() if k in _DONE} | {
        "made_by": "prune_output_gradients"
    }
    return new


def _same(node: fx.Node, other: fx.Node) -> bool:
    a, b = node.meta["val"], other.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
