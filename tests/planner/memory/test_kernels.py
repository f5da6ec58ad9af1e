"""Memory of graphs whose calls Inductor compiles into kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.nodes import copy_nodes
from graphaccel.passes.activations.choose_saved import choose_saved
from graphaccel.passes.decompose import decompose
from graphaccel.planner.memory.liveness import Liveness
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.compiled_traffic import compiled_traffic, kernels_of
from graphaccel.planner.profile.cost import is_view

Captured = Callable[[str], StepGraph]


def copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(copy_nodes(graph, module.graph, {})).meta = {"phase": "output"}
    return graph_module(module, graph)


def peak(graph: fx.GraphModule, *, kernels: bool) -> int:
    count = Liveness(kernels=kernels)
    inputs: list = [[] for _ in graph.graph.find_nodes(op="placeholder")]
    count.run(graph, inputs, "step", 0)
    return count.peak


def launched(graph: fx.GraphModule) -> int:
    """The peak where each kernel runs at its last call: what it writes is allocated there, and what
    it reads lives up to there."""
    order = [n for n in graph.graph.nodes if n.op != "output"]
    row = {n: i for i, n in enumerate(order)}
    kernel_of, traffic = kernels_of(graph.graph), compiled_traffic(order)
    runs: dict[fx.Node, int] = {}
    for node, kernel in kernel_of.items():
        runs[kernel] = max(runs.get(kernel, 0), row[node])
    storages: dict[int, tuple[int, int, int]] = {}

    def ends(node: fx.Node) -> int:
        if is_view(node):
            return max([row[node], *map(ends, node.users)]) if node.users else row[node]
        if node.op == "output":
            return len(order)
        return runs[kernel_of[node]] if node in kernel_of else row[node]

    for node in order:
        value = node.meta.get("val")
        inside = node in traffic and not traffic[node].written
        if node.op != "call_function" or is_view(node) or inside or not hasattr(value, "dtype"):
            continue
        born = runs[kernel_of[node]] if node in kernel_of else row[node]
        end = max([born, *map(ends, node.users)])
        storages[row[node]] = (value.untyped_storage().nbytes(), born, end)
    return max(
        sum(size for size, born, end in storages.values() if born <= at <= end)
        for at in range(len(order))
    )


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_what_lives_within_a_kernel_takes_no_memory(name: str, captured: Captured) -> None:
    """Never less than where a kernel runs as late as it can, and less than without kernels."""
    step = captured(name)
    plan = Plan(1, batch=step.batch_size, min_cut=True)
    graph = choose_saved(decompose(copied(step.graph)), plan, step.positions)
    found = peak(graph, kernels=True)
    assert launched(graph) <= found < peak(graph, kernels=False)
