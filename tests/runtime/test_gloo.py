"""Collectives in the form in which gloo takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphaccel.planner.memory.graph_columns import rows_of
from graphaccel.runtime.gloo import for_gloo

c10d = torch.ops._c10d_functional


def _graph(target: Any, given: int, result: int, *args: Any) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    source = graph.placeholder("given")
    source.meta["val"] = torch.empty(given, device="meta")
    sent = graph.call_function(target, (source, *args))
    sent.meta["val"] = torch.empty(result, device="meta")
    wait = graph.call_function(c10d.wait_tensor.default, (sent,))
    wait.meta["val"] = sent.meta["val"]
    graph.output([wait])
    return graph, sent


def _text(graph: fx.Graph) -> list[str]:
    """Each call, with the names of what it reads."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return [f"{n} = {n.target}{n.args}" for n in calls]


def test_a_sum_into_shards_is_an_all_to_all_and_additions() -> None:
    graph, sent = _graph(c10d.reduce_scatter_tensor.default, 12, 4, "sum", 3, "data")
    for_gloo(sent, 1)
    graph.lint()
    assert _text(graph) == [
        "all_to_all_single_default = "
        "_c10d_functional.all_to_all_single.default(given, [4, 4, 4], [4, 4, 4], 'data')",
        "wait_tensor_default_1 = _c10d_functional.wait_tensor.default(all_to_all_single_default,)",
        "view_default = aten.view.default(wait_tensor_default_1, [3, 4])",
        "select_int = aten.select.int(view_default, 0, 0)",
        "select_int_1 = aten.select.int(view_default, 0, 1)",
        "select_int_2 = aten.select.int(view_default, 0, 2)",
        "add_tensor = aten.add.Tensor(select_int, select_int_1)",
        "add__tensor = aten.add_.Tensor(add_tensor, select_int_2)",
    ]


def test_a_gather_is_a_broadcast_of_each_part_into_its_place() -> None:
    graph, sent = _graph(c10d.all_gather_into_tensor.default, 4, 8, 2, "data")
    for_gloo(sent, 1)
    graph.lint()
    assert _text(graph) == [
        "new_empty_default = aten.new_empty.default(given, [8])",
        "narrow_default = aten.narrow.default(new_empty_default, 0, 4, 4)",
        "copy__default = aten.copy_.default(narrow_default, given)",
        "narrow_default_1 = aten.narrow.default(new_empty_default, 0, 0, 4)",
        "broadcast__default = _c10d_functional.broadcast_.default(narrow_default_1, 0, 'data')",
        "narrow_default_2 = aten.narrow.default(new_empty_default, 0, 4, 4)",
        "broadcast__default_1 = _c10d_functional.broadcast_.default(narrow_default_2, 1, 'data')",
        "wait_tensor_default = _c10d_functional.wait_tensor.default(new_empty_default,)",
    ]


def test_a_maximum_into_shards_stays() -> None:
    graph, sent = _graph(c10d.reduce_scatter_tensor.default, 12, 4, "max", 3, "data")
    before = _text(graph)
    for_gloo(sent, 1)
    assert _text(graph) == before


def test_what_an_all_to_all_brings_is_counted() -> None:
    graph, _ = _graph(c10d.reduce_scatter_tensor.default, 12, 4, "sum", 3, "data")
    module = fx.GraphModule({}, graph)
    plain, exchanged = rows_of(module), rows_of(module, exchanged=True)
    assert plain.size.tolist() == [0, 16, 0]
    assert exchanged.size.tolist() == [0, 48, 16]
    assert exchanged.root.tolist() == [0, 1, 2]  # the sum is no view of what came
    # What is sent is there until the parts are added up, or what waits would read it longer.
    assert plain.last.tolist() == [2, 2, 3]
    assert exchanged.last.tolist() == [1, 2, 3]
