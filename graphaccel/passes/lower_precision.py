"""Mixed precision: compute in bf16 or fp16; parameters, gradients, optimizer state in float32.

before                                          after
  %y: f32[8,32] = aten.linear(%x, %w, %b)         %x_1: bf16[8,32] = aten._to_copy(%x, dtype=bf16)
                                                  %w_1: bf16[32,32] = aten._to_copy(%w, dtype=bf16)
                                                  %b_1: bf16[32] = aten._to_copy(%b, dtype=bf16)
                                                  %y: bf16[8,32] = aten.linear(%x_1, %w_1, %b_1)

The lists are autocast's (PyTorch documentation, "Autocast Op Reference"): matmuls in the low
precision, reductions that need range in float32, everything else in the widest dtype of its inputs.
Micikevicius et al., Mixed Precision Training, 2018, §3. Values that no matmul computes, such as the
residual stream of a transformer, are then float32.

With `stream` low, parameters and floating-point batch leaves are cast before anything reads them,
as FSDP's `MixedPrecisionPolicy(param_dtype)` does and Megatron-LM with `--bf16`: norms read and
return the low precision (their kernels sum in float32), and what is computed in float32 from a
value in low precision is cast back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphaccel.capture.export.export import ForwardGraph
from graphaccel.capture.export.python_function import PythonFunction
from graphaccel.capture.layers.blocks import block_of
from graphaccel.capture.stepgraph import StepGraph, rewritten
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.graphs import deferred_module
from graphaccel.ir.fakes import Fakes
from graphaccel.ir.nodes import copy_nodes
from graphaccel.ir.values import module_path, operands, returned
from graphaccel.kernels.ops.experts import GROUPED_MATMUL
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.graph_builder import set_value
from graphaccel.sharding.rules.notation import tensor_arguments

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
    GROUPED_MATMUL,
}
_WIDE = {
    aten.softmax.int,
    aten.log_softmax.int,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
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


_NORMS = {aten.layer_norm.default, aten.group_norm.default}  # their kernels sum in float32
_REDUCTIONS = {aten.mean.default, aten.mean.dim, aten.sum.default, aten.sum.dim_IntList}


def lower_precision(step: StepGraph, plan: Plan) -> StepGraph:
    """The step with casts, differentiated anew; unchanged in float32."""
    precision = plan.precision
    if precision.compute == "float32":
        return step
    low, through = getattr(torch, precision.compute), precision.stream == precision.compute
    return rewritten(step, lambda f: _cast(f, low, through), scaled=precision.scaled)


def _cast(forward: ForwardGraph, low: torch.dtype, through: bool) -> ForwardGraph:
    """The forward graph with casts, built when it is first read: captures at other sizes seldom
    are."""
    module = deferred_module(forward.graph, lambda: _lowered(forward, low, through), None)
    return replace(forward, graph=module)


def _lowered(forward: ForwardGraph, low: torch.dtype, through: bool) -> fx.Graph:
    graph = fx.Graph()
    graph.output(copy_nodes(graph, forward.graph.graph, {}))
    with torch.no_grad():  # as attention does at run time: its strides depend on it
        if through:
            pairs = zip(graph.find_nodes(op="placeholder"), forward.inputs, strict=True)
            given = {n: spec.kind for n, spec in pairs if spec.kind in ("parameter", "batch")}
            _Stream(graph, low, given).cast()
        else:
            cast_graph(graph, low)
    if not any(o.kind == "loss" for o in forward.outputs):
        with fake_mode_of([n for n in graph.nodes if n.op == "placeholder"]):
            _restore_outputs(forward, graph.output_node())
        graph.lint()
    return graph


def cast_graph(graph: fx.Graph, low: torch.dtype) -> None:
    """Insert the casts, in place; values of nodes are updated."""
    with fake_mode_of([n for n in graph.nodes if n.op == "placeholder"]) as mode:
        fakes = Fakes(mode)
        for node in list(graph.nodes):
            if node.op == "call_function":
                _cast_inputs(node, low)
                set_value(node, fakes)
    graph.lint()


def _cast_inputs(node: fx.Node, low: torch.dtype) -> None:
    if isinstance(node.target, PythonFunction):
        _cast_as_captured(node, node.target)
        return
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


def _cast_as_captured(node: fx.Node, target: PythonFunction) -> None:
    """A gradient rule of the user's own computes in the dtypes it was captured with, as under
    `torch.amp.custom_fwd(cast_inputs=torch.float32)`."""
    for source, wanted in zip(tensor_arguments(node), target.dtypes, strict=False):
        if source.meta["val"].dtype != wanted:
            node.replace_input_with(source, _to(node, source, wanted))


@dataclass
class _Stream:
    """Casts under which every value follows the dtype of the parameters. given: placeholders of
    parameters and of the batch, with their kind. casts: nodes, one for each value, dtype and block;
    for parameters one for each module that reads them."""

    graph: fx.Graph
    low: torch.dtype
    given: Mapping[fx.Node, str]
    casts: dict[tuple[fx.Node, torch.dtype, str], fx.Node] = field(default_factory=dict)

    def cast(self) -> None:
        """Insert the casts, in place; values of nodes are updated."""
        with fake_mode_of([n for n in self.graph.nodes if n.op == "placeholder"]) as mode:
            fakes = Fakes(mode)
            for node in list(self.graph.nodes):
                if node.op == "call_function":
                    self._one(node, fakes)
        self.graph.lint()

    def _one(self, node: fx.Node, fakes: Fakes) -> None:
        if isinstance(node.target, PythonFunction):
            _cast_as_captured(node, node.target)
            set_value(node, fakes)
            return
        kinds = {self._kind(n) for n in tensor_arguments(node)}
        mixed = self.low in kinds and torch.float32 in kinds
        wide = node.target in _WIDE and node.target not in _NORMS
        if node.target == aten.pow.Tensor_Scalar:  # as in the mean of squares; a cube is not summed
            wide = any(user.target in _REDUCTIONS for user in node.users)
        wanted = None
        if node.target in _LOW or node.target in _NORMS:
            wanted = self.low
        elif wide or mixed:
            wanted = torch.float32
        for source in dict.fromkeys(tensor_arguments(node)):
            kind = source.meta["val"].dtype
            goal = wanted or self._kind(source)
            if kind.is_floating_point and kind not in (goal, torch.float64):
                node.replace_input_with(source, self._to(node, source, goal))
        set_value(node, fakes)
        value = node.meta["val"]
        if mixed and not wide and isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            with self.graph.inserting_after(node):
                back = self.graph.call_function(aten._to_copy.default, (node,))
            node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
            back.kwargs = {"dtype": self.low}
            _describe(back, node, node, self.low)

    def _kind(self, source: fx.Node) -> torch.dtype:
        """The dtype in which a value is read where its reader asks for no other."""
        kind = source.meta["val"].dtype
        return self.low if source in self.given and kind == torch.float32 else kind

    def _to(self, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        module = module_path(node)
        # Readers of a tied weight may be on other stages: the cast would have to be sent.
        weight = self.given.get(source) == "parameter"
        key = source, dtype, module if weight else block_of(module)
        if key not in self.casts:
            self.casts[key] = _to(node, source, dtype)
        return self.casts[key]


def _restore_outputs(forward: ForwardGraph, output: fx.Node) -> None:
    """A script that computes the loss itself gets outputs of the dtypes that the model returns, and
    the gradients it passes back have these dtypes."""
    before = returned(forward.graph)
    now = []
    for node, old in zip(operands(output)[0], before, strict=True):
        wanted = old.meta["val"].dtype
        now.append(node if node.meta["val"].dtype == wanted else _to(output, node, wanted))
    output.args = (now,)


def _to(node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(aten._to_copy.default, (source,), {"dtype": dtype})
    _describe(new, node, source, dtype)
    return new


def _describe(new: fx.Node, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> None:
    """Metadata of a cast of `source` that is inserted for `node`."""
    new.meta = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
    new.meta |= {"made_by": "lower_precision", "stands_for": node.meta.get("stands_for", node.name)}
    new.meta["val"] = source.meta["val"].to(dtype)
