"""Compute in bf16 or fp16, with parameters, gradients and optimizer state kept in float32.

before                                          after
  %y: f32[8,32] = aten.linear(%x, %w, %b)         %x_1: bf16[8,32] = aten._to_copy(%x, dtype=bf16)
                                                  %w_1: bf16[32,32] = aten._to_copy(%w, dtype=bf16)
                                                  %b_1: bf16[32] = aten._to_copy(%b, dtype=bf16)
                                                  %y: bf16[8,32] = aten.linear(%x_1, %w_1, %b_1)

The lists are autocast's (PyTorch documentation, "Autocast Op Reference"): products in the low
precision, reductions that need range in float32, everything else in the widest dtype of its inputs.
Micikevicius et al., Mixed Precision Training, 2018, §3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphaccel.capture.export import ForwardGraph
from graphaccel.capture.stepgraph import StepGraph, rewritten
from graphaccel.compat.torch import fake_mode_of, graph_module
from graphaccel.ir.values import propagate
from graphaccel.kernels.experts import PRODUCT
from graphaccel.planner.plan import Plan
from graphaccel.rules.notation import tensor_arguments

aten = torch.ops.aten
_LOW = {
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.convolution.default,
    aten.scaled_dot_product_attention.default,
    PRODUCT,
}
_WIDE = {
    aten.softmax.int,
    aten.log_softmax.int,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.mse_loss.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cumsum.default,
    aten.exp.default,
    aten.log.default,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
}


def lower_precision(step: StepGraph, plan: Plan) -> StepGraph:
    """The step with casts, differentiated again; as it is in float32."""
    if plan.precision.compute == "float32":
        return step
    low = getattr(torch, plan.precision.compute)
    return rewritten(step, lambda f: _cast(f, low), scaled=plan.precision.scaled)


def _cast(forward: ForwardGraph, low: torch.dtype) -> ForwardGraph:
    graph = fx.Graph()
    output = graph.graph_copy(forward.graph.graph, {})
    graph.output(output)
    module = graph_module(forward.graph, graph)
    cast_graph(graph, low)
    if not any(o.kind == "loss" for o in forward.outputs):
        with fake_mode_of([n for n in graph.nodes if n.op == "placeholder"]):
            _restore_outputs(forward, graph.output_node())
        graph.lint()
    module.recompile()
    propagate(module, [n.meta["val"] for n in graph.nodes if n.op == "placeholder"])
    return replace(forward, graph=module)


def cast_graph(graph: fx.Graph, low: torch.dtype) -> None:
    """Put the casts in, in place; values of nodes are updated."""
    with fake_mode_of([n for n in graph.nodes if n.op == "placeholder"]):
        for node in list(graph.nodes):
            if node.op == "call_function":
                _cast_inputs(node, low)
                _update(node)
    graph.lint()


def _cast_inputs(node: fx.Node, low: torch.dtype) -> None:
    if node.target in _LOW:
        wanted = low
    elif node.target in _WIDE:
        wanted = torch.float32
    else:
        kinds = {n.meta["val"].dtype for n in tensor_arguments(node)}
        floating = {k for k in kinds if k.is_floating_point}
        if len(floating) < 2:
            return
        wanted = torch.float32
    for source in dict.fromkeys(tensor_arguments(node)):
        kind = source.meta["val"].dtype
        if kind.is_floating_point and kind not in (wanted, torch.float64):
            node.replace_input_with(source, _to(node, source, wanted))


def _restore_outputs(forward: ForwardGraph, output: fx.Node) -> None:
    """A script that computes the loss itself gets outputs of the dtypes that the model gives, and
    the gradients it hands in are in these."""
    before = forward.graph.graph.output_node().args[0]
    now = []
    for node, old in zip(output.args[0], before, strict=True):
        wanted = old.meta["val"].dtype
        now.append(node if node.meta["val"].dtype == wanted else _to(output, node, wanted))
    output.args = (now,)


def _to(node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    new.meta = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
    new.meta |= {"made_by": "lower_precision", "stands_for": node.meta.get("stands_for", node.name)}
    new.meta["val"] = source.meta["val"].to(dtype)
    return new


def _update(node: fx.Node) -> None:
    values: Any = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    target: Any = node.target
    node.meta["val"] = target(*values[0], **values[1])
