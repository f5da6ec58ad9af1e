"""Ranges of torch's profiler inside the graph of a stage: a range for each module's calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.profiler import record_function

from graphaccel.compat.torch.autograd import ENTER_RANGE, EXIT_RANGE, profiler_enabled
from graphaccel.compat.torch.graphs import BoxedCode, graph_module
from graphaccel.runtime.inductor.compile import Compiled

Boxed = Callable[[list[Any]], Sequence[Any]]


class ModuleRanges:
    """The graphs of one rank as a profiler sees them. They are made where one is on, once for each
    graph, and take the place of the others in its steps."""

    def __init__(self) -> None:
        self._ranged: dict[int, tuple[Any, Boxed]] = {}

    def of(self, graph: Any) -> Boxed:
        """The graph, or with ranges where a profiler is on."""
        if not profiler_enabled():
            return graph  # type: ignore[no-any-return]
        kept = self._ranged.get(id(graph))
        if kept is None or kept[0] is not graph:
            own = _pieces(graph) if isinstance(graph, Compiled) else with_module_ranges(graph)
            kept = self._ranged[id(graph)] = (graph, own)
        return kept[1]


def with_module_ranges(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph in which each run of calls of one module is in a range of the profiler,
    "graphaccel: PATH"."""
    graph, copies = fx.Graph(), {}
    graph.set_codegen(BoxedCode())
    inside, handle = "", None
    for node in module.graph.nodes:
        path = _module(node) if node.op == "call_function" else ""
        if path != inside and node.op != "get_attr":
            if handle is not None:
                graph.call_function(EXIT_RANGE, (handle,))
            handle = graph.call_function(ENTER_RANGE, (_name(path), None)) if path else None
            inside = path
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    return graph_module(module, graph)


def _pieces(compiled: Compiled) -> Boxed:
    """Compiled code, each piece of it in a range with the path that its calls have in common."""

    def inside(run: Boxed, nodes: Sequence[fx.Node]) -> Boxed:
        name = _name(_common(nodes))

        def ranged(boxed: list[Any]) -> Sequence[Any]:
            with record_function(name):
                return run(boxed)

        return ranged

    return compiled.with_runs(inside)


def _module(node: fx.Node) -> str:
    return node.meta.get("module") or ""


def _common(nodes: Sequence[fx.Node]) -> str:
    paths = [path.split(".") for path in map(_module, nodes) if path]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in same)


def _name(path: str) -> str:
    return f"graphaccel: {path or 'the model'}"
