"""Collectives issued early and waited for late: the order, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from graphaccel.passes.overlap_collectives import overlap_collectives
from graphaccel.sharding.apply.shard_axis import shard_axis
from graphaccel.sharding.solve.placements import solve_placements
from tests.sharding.test_shard_axis import RATES, captured, check

_C10D = torch.ops._c10d_functional


def moved(module: fx.GraphModule) -> None:
    """The pass on one graph."""

    class Program:
        forward, backwards = module, {}

    overlap_collectives(Program())  # type: ignore[arg-type]


def overlapped(graph: fx.Graph) -> int:
    """Products that run while something travels."""
    nodes = list(graph.nodes)
    in_flight, count = 0, 0
    for node in nodes:
        if node.target is _C10D.wait_tensor.default:
            in_flight -= 1
        elif "c10d" in str(node.target):
            in_flight += 1
        elif in_flight and getattr(node.target, "overloadpacket", None) in flop_registry:
            count += 1
    assert in_flight == 0
    return count


@pytest.mark.parametrize(
    ("name", "sequence", "products"), [("gpt", False, 33), ("llama", True, 29)]
)
def test_products_run_while_something_travels(name: str, sequence: bool, products: int) -> None:
    step, graph, _ = captured(name)
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs,
        axis="tensor", ranks=2, rates=RATES, pins={}, sequence=sequence,
    )  # fmt: skip
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="tensor", ranks=2)
    kinds = sorted(str(n.target) for n in made.graph.graph.nodes)
    assert overlapped(made.graph.graph) == 0
    moved(made.graph)
    assert sorted(str(n.target) for n in made.graph.graph.nodes) == kinds
    # Of 51 and 87: in each layer the gradients of its weights that are split by columns, and more.
    assert overlapped(made.graph.graph) == products
    check(name, made, "tensor", 2)


def test_nothing_is_delayed_twice() -> None:
    """A product moves behind the next collective, not behind all that follow."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    aten = torch.ops.aten
    late = graph.call_function(aten.mm.default, (x, w))
    first = graph.call_function(aten.mul.Scalar, (x, 2.0))
    one = graph.call_function(_C10D.all_reduce.default, (first, "sum", "tensor"))
    one_here = graph.call_function(_C10D.wait_tensor.default, (one,))
    viewed = graph.call_function(aten.t.default, (one_here,))
    second = graph.call_function(aten.mul.Scalar, (x, 3.0))
    two = graph.call_function(_C10D.all_reduce.default, (second, "sum", "tensor"))
    two_here = graph.call_function(_C10D.wait_tensor.default, (two,))
    total = graph.call_function(aten.add.Tensor, (viewed, two_here))
    graph.output([late, total])
    module = fx.GraphModule(torch.nn.Module(), graph)
    moved(module)
    assert [n for n in module.graph.nodes if n.op == "call_function"] == [
        first, one, late, second, two, one_here, viewed, two_here, total,
    ]  # fmt: skip


def test_a_result_is_waited_for_when_a_later_one_is() -> None:
    """What only the output reads is not left until the end: what it was sent from can go."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    sent, here = {}, {}
    for name, axis in (("early", "tensor"), ("other", "data"), ("late", "tensor")):
        sent[name] = graph.call_function(_C10D.all_reduce.default, (x, "sum", axis))
        here[name] = graph.call_function(_C10D.wait_tensor.default, (sent[name],))
    read = graph.call_function(aten.mul.Scalar, (here["late"], 2.0))
    after = graph.call_function(aten.mul.Scalar, (read, 2.0))
    graph.output([here["early"], here["other"], after])
    module = fx.GraphModule(torch.nn.Module(), graph)
    moved(module)
    assert [n for n in module.graph.nodes if n.op == "call_function"] == [
        *sent.values(), here["early"], here["late"], read, after, here["other"],
    ]  # fmt: skip
