"""Decompose an exported forward to functional ATen calls without in-place writes.

exported                                              after
  %r: f32[8,4] = aten.reshape.default(%x, [8, 4])       %v: f32[8,4] = aten.view.default(%x, [8, 4])
  %d: f32[8,4] = aten.dropout.default(%r, 0.0, True)    %c: f32[8,4] = aten.clone.default(%v)
  %y: f32[8,4] = aten.linear.default(%d, %w)            %y: f32[8,4] = aten.linear.default(%c, %w)

Export records calls before autograd sees them. Ops that may return their input, or a view of it,
are decomposed here, and regions without gradients are inlined: the result of
`ExportedProgram.run_decompositions({})`, in a tenth of its time, since no call runs twice.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback

from graphaccel.capture.trace import Answers, NotTraced, Tracing
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.compat.torch.modes import without_modes
from graphaccel.compat.torch.ops import (
    grad_region,
    is_composite,
    is_preservable_composite,
    writes_beyond_schema,
    written_arguments,
)

aten = torch.ops.aten
_OP = type(aten.add.Tensor)


@dataclass(frozen=True)
class Exported:
    """A forward as exported: its graph, the specs of its placeholders and results, and
    constants."""

    graph_module: fx.GraphModule = field(repr=False)
    graph_signature: Any = field(repr=False)
    constants: dict[str, Any] = field(repr=False)


def decomposed(program: Any, answers: Answers | None = None) -> Exported:
    """The functional form of an exported program: by one trace, or by torch where that fails.

    answers: cached results of calls, shared with other traces.
    """
    try:
        graph = _functional(program.graph_module, {} if answers is None else answers)
    except NotTraced:
        program = program.run_decompositions({})
        graph = program.graph_module
    return Exported(graph, program.graph_signature, program.constants)


def _functional(exported: fx.GraphModule, answers: Answers) -> fx.GraphModule:
    """Raises NotTraced where a call writes, or is not an ATen op."""
    places = exported.graph.find_nodes(op="placeholder")
    tracing = Tracing(fake_mode_of(places), answers)
    values = [_value(node) for node in places]
    with without_modes(), torch.no_grad(), fx_traceback.preserve_node_meta():
        for node, value in zip(places, values, strict=True):
            if isinstance(value, torch.Tensor):
                tracing.take(value, node.name)
            else:
                tracing.graph.placeholder(node.name)
        with tracing:
            results = _Calls(exported, tracing).run(*values)
    tracing.graph.output(tuple(tracing.known(result).node for result in results))
    for node in tracing.graph.nodes:
        if written_arguments(node) or writes_beyond_schema(node.target):
            raise NotTraced(f"{node.target} writes")
    tracing.graph.eliminate_dead_code()
    return graph_module(torch.nn.Module(), tracing.graph)


def _value(place: fx.Node) -> Any:
    value = place.meta["val"]
    return value.detach() if isinstance(value, torch.Tensor) else value


class _Calls(fx.Interpreter):
    """Runs an exported graph and sends its calls to `tracing`."""

    def __init__(self, graph: fx.GraphModule, tracing: Tracing) -> None:
        super().__init__(graph)
        self._tracing = tracing

    def run_node(self, n: fx.Node) -> Any:
        region = grad_region(n)
        if region is None:
            return super().run_node(n)
        _, name, inputs = region
        given = [self.env[node] for node in inputs]
        return _Calls(getattr(self.module, name), self._tracing).run(*given)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        if target is aten._assert_tensor_metadata.default:
            return None
        if not isinstance(target, _OP) or target.namespace != "aten":
            raise NotTraced(f"{target}")
        if target._schema.is_mutable:
            raise NotTraced(f"{target} writes")
        if is_preservable_composite(target):
            with without_modes():
                return self._tracing.call(target, args, kwargs, whole=True)
        return (
            target.decompose(*args, **kwargs) if is_composite(target) else target(*args, **kwargs)
        )
