"""Differentiate a forward graph to one joint graph of loss and gradients.

Every node of the result has provenance:
  meta["phase"]   "forward" or "backward"
  meta["origin"]  name of the forward-graph node it computes, or computes the derivative of
  meta["module"]  module path, as the user would write it (`transformer.h.0.mlp`)
  meta["location"] (file, line) in the user's code, where known
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from graphaccel.capture.export.export import ForwardGraph, GraphInput, GraphOutput
from graphaccel.capture.export.watch import INSIDE
from graphaccel.capture.functional import SharedWrite, without_writes
from graphaccel.capture.layers.blocks import block_of
from graphaccel.capture.trace import Answers, NotTraced, trace
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.modes import without_modes
from graphaccel.compat.torch.onednn import without_onednn
from graphaccel.compat.torch.ops import written_arguments
from graphaccel.errors import CaptureRefused
from graphaccel.errors.messages import Location
from graphaccel.ir.values import module_path, returned

log = logging.getLogger("graphaccel.capture")

aten = torch.ops.aten
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
"""A line of a node's stack trace: file and number."""
# Checks of values: where eager mode raises, the result becomes NaN or infinite.
_CHECKS = {aten._linalg_check_errors.default}
_NO_OPS = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


def differentiate(
    forward: ForwardGraph,
    trainable: frozenset[str],
    *,
    scaled: bool = False,
    answers: Answers | None = None,
) -> tuple[fx.GraphModule, tuple[GraphOutput, ...]]:
    """The joint graph: placeholders as in `forward`, then tangents if there is no loss.

    trainable: names of the parameters that require a gradient. scaled: adds an input, a float32
    number that the loss is multiplied by before it is differentiated. answers: cached results of
    calls, shared with the traces of similar graphs.
    Without a loss in the graph every floating-point output that requires a gradient is
    differentiated against a tangent input.
    Outputs: those of `forward`, then the gradients of each trainable parameter, and of each batch
    leaf that requires one, that the loss reaches.

    Raises CaptureRefused (GA102) where a call writes in place and has no functional form.
    """
    placeholders = [n for n in forward.graph.graph.nodes if n.op == "placeholder"]
    for node in forward.graph.graph.nodes:
        node.meta["custom"] = {"origin": node.name, "phase": "forward"}
        node.meta.pop("from_node", None)  # else copied for each call, with its contents
    wanted = [i for i, spec in enumerate(forward.inputs) if _wanted(spec, trainable)]
    heads = [i for i, o in enumerate(forward.outputs) if o.kind == "loss"]
    tangents_for = [] if heads or not wanted else _differentiable_outputs(forward)
    mode, step = fake_mode_of(placeholders), _Step(forward, wanted, heads, tangents_for)
    with mode:
        values = [_fresh(n.meta["val"], i in wanted) for i, n in enumerate(placeholders)]
        output = returned(forward.graph)
        values += [torch.empty_like(output[i].meta["val"]) for i in tangents_for]
        if scaled and heads and wanted:
            values.append(torch.empty((), device=output[heads[0]].meta["val"].device))
    joint = _traced(step, values, mode, answers)
    names = forward.inputs + tangent_inputs(forward, trainable, scaled=scaled)
    _write_numbers(joint, mode)
    _tidy(joint, names)
    try:
        without_writes(joint)
    except SharedWrite:
        with mode, torch.no_grad(), fx_traceback.preserve_node_meta():
            joint = make_fx(functionalize(fx.Interpreter(joint).run))(*values)
        _tidy(joint, names)
    _annotate(joint, forward)
    _refuse_writes(joint)
    _merge_casts(joint, names)
    return joint, forward.outputs + tuple(_gradient(forward.inputs[i]) for i in step.reached)


class _Step:
    """The forward and its backward, to be traced.

    wanted: inputs whose gradients are computed. heads: outputs that are the loss; without one the
    outputs `tangents_for` are differentiated, against as many more inputs. reached: after a call,
    the inputs that have a gradient.
    """

    def __init__(
        self, forward: ForwardGraph, wanted: list[int], heads: list[int], tangents_for: list[int]
    ) -> None:
        self._forward, self._wanted = forward, wanted
        self._heads, self._roots = heads, heads or tangents_for
        self.reached: list[int] = []

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """The forward's outputs, and the gradients of the inputs that they depend on."""
        count = len(self._forward.inputs)
        values, tangents = values[:count], values[count:]
        outputs = _Recorder(self._forward.graph, _Origins()).run(*values)
        roots = [outputs[i] for i in self._roots]
        tracked = [
            (o, t)
            for o, t in zip(roots, tangents or [None] * len(roots), strict=True)
            if o.requires_grad
        ]
        if not self._wanted or not tracked:
            return outputs
        marked = self._heads[0] if self._heads else 0
        _backward_marker(returned(self._forward.graph)[marked])(())
        gradients = torch.autograd.grad(
            [o for o, _ in tracked],
            [values[i] for i in self._wanted],
            [t.to(o.dtype) for o, t in tracked if t is not None] if tangents else None,
            allow_unused=True,
        )
        fx_traceback.current_meta.clear()
        pairs = zip(self._wanted, gradients, strict=True)
        self.reached = [i for i, g in pairs if g is not None]
        return [*outputs, *(g for g in gradients if g is not None)]


def _traced(
    step: Callable[..., list[torch.Tensor]],
    values: Sequence[torch.Tensor],
    mode: Any,
    answers: Answers | None,
) -> fx.GraphModule:
    """The graph of a step: by `capture.trace`, else by torch's make_fx."""
    with (
        torch.enable_grad(),
        fx_traceback.preserve_node_meta(),
        torch.autograd.set_multithreading_enabled(False),
        # Anomaly mode of the script reads the values of gradients, which a trace has not.
        torch.autograd.set_detect_anomaly(False),
        # An LSTM layer is the ops of its cells on every device. On a CPU it could be one op of
        # oneDNN, whose backward reads memory that no graph can pass on
        # (`select_one_layer_lstm_function`, torch/_decomp/decompositions.py).
        without_onednn(),
    ):
        try:
            # Copies: an abandoned trace must not have touched the values.
            fresh = [_fresh(v, getattr(v, "requires_grad", False)) for v in values]
            return trace(step, fresh, mode, answers)
        except NotTraced as reason:
            said = str(reason).splitlines()[0]  # `fx.Interpreter` appends the location
            log.info("traced by make_fx: %s", said)
            fx_traceback.current_meta.clear()  # an abandoned backward may have left its metadata
        with mode:
            return make_fx(step)(*values)


def _wanted(spec: GraphInput, trainable: frozenset[str]) -> bool:
    return spec.tracked or (spec.kind == "parameter" and spec.name in trainable)


def _gradient(spec: GraphInput) -> GraphOutput:
    if spec.kind == "batch":
        return GraphOutput("input_gradient", spec.name, spec.leaf)
    return GraphOutput("gradient", spec.name)


def tangent_inputs(
    forward: ForwardGraph, trainable: frozenset[str], *, scaled: bool = False
) -> tuple[GraphInput, ...]:
    """The inputs that `differentiate` adds: the loss scale, or a tangent for each differentiable
    output if there is no loss."""
    if not any(_wanted(i, trainable) for i in forward.inputs):
        return ()
    if any(o.kind == "loss" for o in forward.outputs):
        return (GraphInput("scale", "loss"),) if scaled else ()
    leaves = [forward.outputs[i].leaf for i in _differentiable_outputs(forward)]
    return tuple(GraphInput("tangent", f"output {leaf}", leaf) for leaf in leaves)


def _differentiable_outputs(forward: ForwardGraph) -> list[int]:
    values = returned(forward.graph)
    return [
        i
        for i, (spec, node) in enumerate(zip(forward.outputs, values, strict=True))
        if spec.kind == "output"
        and spec.leaf in forward.returned.tracked
        and node.meta["val"].is_floating_point()
    ]


def _fresh(value: Any, requires_grad: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(requires_grad)


class _Origins:
    """Marks autograd nodes with the forward node that created them, right after creation."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def mark(self, node: fx.Node, result: Any) -> None:
        tensors = [t for t in _tensors(result) if t.grad_fn is not None]
        stack = [t.grad_fn for t in tensors]
        while stack:
            step = stack.pop()
            if step is None or step in self._seen:
                continue
            self._seen.add(step)
            # Not by `step.name()`: of a user's function the node is `ctx`, on which it may set one.
            if type(step).__name__ != "AccumulateGrad":
                step.register_prehook(_backward_marker(node))
                stack += [previous for previous, _ in step.next_functions]


def _backward_marker(node: fx.Node) -> Callable[[Sequence[torch.Tensor]], None]:
    custom = {"origin": node.name, "phase": "backward"}

    def mark(_gradients: Sequence[torch.Tensor]) -> None:
        fx_traceback.current_meta.clear()
        fx_traceback.current_meta["custom"] = custom

    return mark


class _Recorder(fx.Interpreter):
    """Runs the forward graph and marks every autograd node with the name of its forward node."""

    def __init__(self, graph: fx.GraphModule, origins: _Origins) -> None:
        super().__init__(graph)
        self._origins = origins

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self._origins.mark(n, result)
        return result


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t for r in result for t in _tensors(r)]
    return []


def _name_placeholders(joint: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Name placeholders after their contents: `p_transformer_wte_weight`, `x_input_ids`; where two
    would be called alike (`w` and `w_`), the later with a number."""
    letter = {
        "parameter": "p",
        "buffer": "u",
        "constant": "k",
        "batch": "x",
        "tangent": "g",
        "scale": "scale",
    }
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    taken: Counter[str] = Counter()
    for node, spec in zip(placeholders, inputs, strict=True):
        name = f"{letter[spec.kind]}_{re.sub(r'[^0-9A-Za-z]+', '_', spec.name)}"
        taken[name] += 1
        number = f"_no{taken[name]}" if taken[name] > 1 else ""
        node.name = node.target = f"{name}{number}"


def _tidy(joint: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    _name_placeholders(joint, inputs)
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.target in _NO_OPS:
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
        elif node.target in _CHECKS:
            joint.graph.erase_node(node)
        elif node.target is aten.view.default:
            # As in canonical form: strides of kernels may differ from those of their fakes.
            node.target = aten.reshape.default
    joint.graph.eliminate_dead_code()
    joint.graph.lint()


def _write_numbers(joint: fx.GraphModule, mode: Any) -> None:
    """Replace constant tensors of one number in a gradient rule (`torch.tensor(0.5)`) by `full`
    calls in the graph."""
    for node in joint.graph.find_nodes(op="get_attr"):
        value = getattr(joint, str(node.target))
        with without_modes():
            number = value.item()
        kind = {"dtype": value.dtype, "device": value.device}
        with joint.graph.inserting_before(node):
            built = joint.graph.call_function(aten.full.default, (list(value.shape), number), kind)
        with mode:
            built.meta = {**node.meta, "val": torch.full(value.shape, number, **kind)}
        node.replace_all_uses_with(built)
        joint.graph.erase_node(node)


def _refuse_writes(joint: fx.GraphModule) -> None:
    """Raises CaptureRefused (GA102) at a call that writes in place."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and written_arguments(node):
            line = node.meta["location"]
            raise CaptureRefused(
                module=node.meta["module"],
                location=Location(*line) if line else None,
                reason=f"{node.target} writes over memory that other values look at",
            )


def _annotate(joint: fx.GraphModule, forward: ForwardGraph) -> None:
    """Set phase, origin, module path and source line of every node, from the marks made while
    tracing."""
    modules = {n.name: module_path(n) for n in forward.graph.graph.nodes}
    locations = {n.name: source_line(n) for n in forward.graph.graph.nodes}
    backward = False
    for node in joint.graph.nodes:
        mark = node.meta.get("custom") or {}
        backward = backward or mark.get("phase") == "backward"
        if node.op == "placeholder":
            node.meta["phase"] = "input"
            continue
        node.meta["phase"] = "backward" if backward else "forward"
        origin = mark.get("origin", "")
        node.meta["origin"] = origin
        node.meta["module"] = modules.get(origin, "")
        node.meta["location"] = locations.get(origin)


def _merge_casts(joint: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Merge casts of a value to one dtype for all readers in a block and phase; casts of a
    parameter, for all readers in a module: readers of a tied parameter may be on other stages.

    Not before differentiation: gradients then pass back through one cast each and are summed in the
    wide dtype, as in autocast.
    """
    given = zip(joint.graph.find_nodes(op="placeholder"), inputs, strict=True)
    parameters = {n for n, spec in given if spec.kind == "parameter"}
    first: dict[Any, fx.Node] = {}
    for node in list(joint.graph.find_nodes(op="call_function", target=aten._to_copy.default)):
        place = node.meta["module"], node.meta["phase"]
        if node.all_input_nodes[0] not in parameters:
            place = block_of(place[0]), place[1]
        kept = first.setdefault((node.args, tuple(sorted(node.kwargs.items())), place), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            joint.graph.erase_node(node)
    joint.recompile()


def source_line(node: fx.Node) -> tuple[str, int] | None:
    """(file, line) of the user's code that created a node."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, int(line)) for file, line in frames if not file.startswith(INSIDE)]
    return own[-1] if own else None
