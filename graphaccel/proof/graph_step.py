"""Interprets the joint graph of a captured step on real tensors, at any batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import evaluate, with_integers
from graphaccel.kernels.ops.attention_cuda import attention_on_gpu
from graphaccel.proof.magnitudes import Magnitudes
from graphaccel.proof.results import Results, norm_of

Observer = Callable[[fx.Node, Any], None]
Keep = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a step. parameters, buffers: by every name. leaves: of the batch, at the size
    in `sizes`. tangents: by output leaf, where the script computes the loss."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    leaves: Sequence[Any]
    tangents: Mapping[int, Tensor]
    device: torch.device


class GraphFailed(Exception):
    """A node of a graph cannot be run. The cause is what its op raised."""

    def __init__(self, node: fx.Node, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.node = node


@torch.no_grad()
def run_graph(
    step: StepGraph,
    sizes: Mapping[sympy.Symbol, int],
    inputs: Inputs,
    observe: Observer | None = None,
    keep: Keep | None = None,
) -> Results:
    """Loss, outputs and gradients of the step with `sizes` for its symbols.

    observe: called with each node and its value. A value is freed after its last use. keep: maps
    each result, as soon as it is computed, to what is returned of it, so that not all gradients are
    held at once.

    Raises GraphFailed, and torch.OutOfMemoryError.
    """
    if inputs.device.type == "cuda":
        attention_on_gpu()
    values: dict[fx.Node, Any] = {}
    uses: dict[fx.Node, int] = {}
    given = iter(_given(step, inputs))
    outputs: Any = step.graph.graph.output_node().args[0]
    results = {n for n in outputs if isinstance(n, fx.Node)}
    built: dict[fx.Node, Any] = {}
    output: list[Any] = []
    magnitudes = Magnitudes(step.graph.graph, _new_buffers(step).values())
    for node in step.graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = _attribute(step.graph, str(node.target), inputs.device)
        elif node.op == "call_function":
            values[node] = _call(node, sizes, values, inputs.device)
        else:
            output = [built.get(n) if isinstance(n, fx.Node) else n for n in node.args[0]]
            break
        magnitudes.see(node, values[node], lambda n, v: _call(n, sizes, v, inputs.device))
        uses[node] = len(node.users)
        if node in results:
            built[node] = _result(values[node], keep)
            uses[node] -= 1
        if observe is not None:
            observe(node, values[node])
        for source in node.all_input_nodes:
            uses[source] -= 1
            if not uses[source]:
                del values[source]
        if not uses[node]:
            del values[node]
    sizes_of = {
        k: magnitudes.found[n] for k, n in _new_buffers(step).items() if n in magnitudes.found
    }
    return replace(_sorted(step, output), magnitudes={k: norm_of(t) for k, t in sizes_of.items()})


def _new_buffers(step: StepGraph) -> dict[str, Any]:
    """The outputs that are new values of buffers, by name."""
    outputs: Any = step.graph.graph.output_node().args[0]
    return {s.name: n for s, n in zip(step.outputs, outputs, strict=True) if s.kind == "buffer"}


def _given(step: StepGraph, inputs: Inputs) -> list[Any]:
    collected: list[Any] = []
    constants = step.forward.constants
    for spec in step.inputs:
        if spec.kind == "parameter":
            collected.append(inputs.parameters[spec.name].detach())
        elif spec.kind == "buffer":
            held = inputs.buffers if spec.name in inputs.buffers else inputs.parameters
            collected.append(
                held[spec.name].detach()
            )  # a frozen parameter that the forward updates
        elif spec.kind == "constant":
            collected.append(constants[spec.name].to(inputs.device))
        elif spec.kind == "batch":
            collected.append(inputs.leaves[spec.leaf].detach().contiguous())
        elif spec.kind == "tangent":
            collected.append(inputs.tangents[spec.leaf])
        else:  # the loss scale: none
            collected.append(torch.ones((), device=inputs.device))
    return collected


def _call(
    node: fx.Node,
    sizes: Mapping[sympy.Symbol, int],
    values: Mapping[fx.Node, Any],
    device: torch.device,
) -> Any:
    fixed = {i: evaluate(e, sizes) for i, e in node.meta.get("sizes", {}).items()}
    args, kwargs = with_integers(node, fixed) if fixed else (node.args, node.kwargs)

    def real(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        return device if isinstance(argument, torch.device) else argument

    args, kwargs = map_aggregate(args, real), map_aggregate(kwargs, real)
    assert callable(node.target)
    try:
        return node.target(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an op may raise anything
        raise GraphFailed(node, error) from error


def _attribute(graph: fx.GraphModule, name: str, device: torch.device) -> Any:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part)
    return value.to(device) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class _Kept:
    """What is kept of a result. floating: whether its dtype is floating-point."""

    kept: Any
    floating: bool


def _result(value: Any, keep: Keep | None) -> _Kept | None:
    if not isinstance(value, Tensor):
        return None
    dense = value if value.layout == torch.strided else value.to_dense()
    return _Kept(dense if keep is None else keep(dense), dense.is_floating_point())


def _sorted(step: StepGraph, output: Sequence[Any]) -> Results:
    by_kind: dict[str, dict[Any, Any]] = {}
    for spec, value in zip(step.outputs, output, strict=True):
        key = spec.leaf if spec.kind in ("output", "input_gradient") else spec.name
        if isinstance(value, _Kept) and (value.floating or spec.kind != "output"):
            by_kind.setdefault(spec.kind, {})[key] = value.kept
    losses = by_kind.get("loss", {})
    return Results(
        next(iter(losses.values()), None),
        by_kind.get("output", {}),
        by_kind.get("gradient", {}),
        {f"leaf {k}": v for k, v in by_kind.get("input_gradient", {}).items()},
        by_kind.get("buffer", {}) | by_kind.get("parameter", {}),
    )
