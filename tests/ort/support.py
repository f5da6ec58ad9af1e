"""One op as a region, run on real tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from graphaccel.ort.kernels import Kernels
from graphaccel.ort.session import Region, Sessions
from graphaccel.ort.translate import refusal, translate


def graph_of(target: Any, args: Any, kwargs: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    """The call as a graph that returns its results one by one, and the tensors it is given.

    Real tensors stand where a captured graph has fake ones: that is much faster to make.
    """
    graph = fx.Graph()
    given: list[Tensor] = []

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        given.append(value)
        return _valued(graph.placeholder(f"x{len(given)}"), value)

    args, kwargs = fx.node.map_aggregate((tuple(args), dict(kwargs)), placed)
    results = target(*_real(args, given), **_real(kwargs, given))
    call = _valued(graph.call_function(target, args, kwargs), results)
    if isinstance(results, Tensor):
        graph.output([call])
    else:
        graph.output(
            [
                _valued(graph.call_function(operator.getitem, (call, i)), r)
                for i, r in enumerate(results)
                if r is not None
            ]
        )
    return fx.GraphModule({}, graph), given


def _valued(node: fx.Node, value: Any) -> fx.Node:
    node.meta["val"] = value
    return node


def _real(value: Any, given: list[Tensor]) -> Any:
    names = {f"x{i + 1}": t for i, t in enumerate(given)}
    return fx.node.map_arg(value, lambda n: names[n.name])


def why_not(module: fx.GraphModule, kernels: Kernels) -> str | None:
    """The reason why some call of a graph can not be in a region."""
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return next((r for r in (refusal(n, kernels) for n in calls) if r), None)


def run(module: fx.GraphModule, given: list[Tensor], kernels: Kernels) -> list[Tensor]:
    """All calls of a graph as one region; the model is checked on the way."""
    graph = module.graph
    inputs = {n: n.meta["val"] for n in graph.nodes if n.op == "placeholder"}
    calls = [n for n in graph.nodes if n.op == "call_function"]
    model = translate(calls, inputs, list(graph.output_node().args[0]), kernels)
    onnx.checker.check_model(model.content)
    return Region(model, Sessions(threads=1), "a test")(*given)


def narrow(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """float64 tensors and dtypes as `dtype`."""
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        return value.to(dtype)
    if value is torch.float64:
        return dtype
    if isinstance(value, (tuple, list)):
        return type(value)(narrow(v, dtype) for v in value)
    if isinstance(value, Mapping):
        return {k: narrow(v, dtype) for k, v in value.items()}
    return value
