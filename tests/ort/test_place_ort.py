"""Choosing regions and putting calls in their place."""

from __future__ import annotations

import operator
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.ir.program import StageProgram, StepProgram, Value
from graphaccel.ir.text import graph_text
from graphaccel.ir.values import propagate
from graphaccel.ort.kernels import Kernels
from graphaccel.ort.partition import Flow, partition
from graphaccel.ort.session import Sessions
from graphaccel.passes.place_ort import Tools, place_ort
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import is_view

aten = torch.ops.aten


def module_of(nodes: Any, shapes: dict[str, tuple[int, ...]]) -> fx.GraphModule:
    """A graph made by `nodes(graph, *placeholders)`, which returns its results."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in shapes]
    graph.output(nodes(graph, *inputs))
    module = fx.GraphModule({}, graph)
    with FakeTensorMode():
        values = [torch.empty(s) for s in shapes.values()]
    propagate(module, values)
    return module


def stage_of(forward: fx.GraphModule) -> StageProgram:
    results = forward.graph.output_node().args[0]
    values = tuple(Value("output", n.name, leaf=i) for i, n in enumerate(results))
    return StageProgram(0, forward, (), values, {}, (), ())


def placed(forward: fx.GraphModule, kernels: Kernels, ort: Any = "all") -> tuple[Any, Any]:
    tools = Tools(kernels, Sessions(threads=1))
    programs, report = place_ort([stage_of(forward)], Plan(devices=1, ort=ort), tools)
    return programs[0].forward, report


def test_before_and_after(kernels: Kernels) -> None:
    def nodes(graph: fx.Graph, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        t = graph.call_function(aten.t.default, (w,))
        mm = graph.call_function(aten.mm.default, (x, t))
        random = graph.call_function(aten.bernoulli.default, (mm,))
        return [graph.call_function(aten.relu.default, (random,))]

    module = module_of(nodes, {"x": (4, 8), "w": (6, 8)})
    got, report = placed(module, kernels)
    keys = [r.key for r in report.regions]
    text = graph_text(got.graph)
    for number, key in enumerate(keys):
        text = text.replace(key, f"K{number}")
    assert (
        text
        == """\
%x: f32[4,8] = input
%w: f32[6,8] = input
%region_K0: (f32[4,6]) = ort.region_K0(%x, %w)
%getitem: f32[4,6] = getitem(%region_K0, 0)
%bernoulli_default: f32[4,6] = aten.bernoulli(%getitem)
%region_K1: (f32[4,6]) = ort.region_K1(%bernoulli_default)
%getitem_1: f32[4,6] = getitem(%region_K1, 0)
return (%getitem_1)
"""
    )
    assert (report.nodes, report.placed) == (3, 2)
    (declined,) = report.declined
    assert (declined.op, declined.reason) == ("aten.bernoulli", "it draws random numbers")


def test_a_view_that_others_read_stays_outside_and_costs_nothing(kernels: Kernels) -> None:
    def nodes(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        y = graph.call_function(aten.exp.default, (x,))
        turned = graph.call_function(aten.t.default, (y,))
        return [turned, graph.call_function(aten.mul.Tensor, (turned, 2.0))]

    module = module_of(nodes, {"x": (4, 8)})
    x = torch.randn(4, 8)
    got, _ = placed(module, kernels)
    (call,) = [n for n in got.graph.nodes if "region" in n.name]
    assert [tuple(v.shape) for v in call.meta["val"]] == [(4, 8), (8, 4)]
    turned, doubled = got(x)
    assert turned.untyped_storage().data_ptr() != doubled.untyped_storage().data_ptr()
    assert turned.stride() == (1, 8)
    torch.testing.assert_close(doubled, x.exp().t() * 2)


def test_results_lie_in_memory_as_before(kernels: Kernels) -> None:
    def nodes(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        turned = graph.call_function(aten.t.default, (x,))
        return [graph.call_function(aten.exp.default, (turned,))]

    module = module_of(nodes, {"x": (4, 8)})
    x = torch.randn(4, 8)
    got, _ = placed(module, kernels)
    (result,) = got(x)
    assert result.stride() == (1, 8) == module(x)[0].stride()
    torch.testing.assert_close(result, x.t().exp())


def test_inputs_with_gaps_are_copied_by_a_node_of_the_graph(kernels: Kernels) -> None:
    def nodes(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        half = graph.call_function(aten.slice.Tensor, (x, 1, 0, 4))
        random = graph.call_function(aten.bernoulli_.float, (half, 0.5))
        return [graph.call_function(aten.exp.default, (random,))]

    module = module_of(nodes, {"x": (4, 8)})
    got, report = placed(module, kernels)
    assert not report.regions  # what is written into may not be read elsewhere
    assert {d.reason for d in report.declined} == {
        "it draws random numbers",
        "its memory is written into by another op",
    }
    with FakeTensorMode():
        value = torch.empty(4, 8)[:, :4]
    graph = fx.Graph()
    source = graph.placeholder("x")
    graph.output([graph.call_function(aten.exp.default, (source,))])
    gaps = fx.GraphModule({}, graph)
    propagate(gaps, [value])
    got, _ = placed(gaps, kernels)
    first = next(n for n in got.graph.nodes if n.op == "call_function")
    assert first.target is aten.clone.default
    x = torch.randn(4, 8)[:, :4]
    torch.testing.assert_close(got(x)[0], x.exp())


def test_only_chosen_modules(kernels: Kernels) -> None:
    def nodes(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        first = graph.call_function(aten.exp.default, (x,))
        second = graph.call_function(aten.sin.default, (first,))
        first.meta["module"], second.meta["module"] = "net.one.act", "net.oneness"
        return [second]

    module = module_of(nodes, {"x": (4, 8)})
    got, report = placed(module, kernels, ort=("net.one",))
    assert [(r.module, r.ops) for r in report.regions] == [("net.one.act", 1)]
    assert (report.nodes, report.placed, report.declined) == (2, 1, ())
    assert aten.sin.default in [n.target for n in got.graph.nodes]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_regions_are_convex_and_keep_the_order(data: st.DataObject) -> None:
    """On random graphs: the regions have an order in which they can run, no path leaves one and
    comes back, and nothing is lost."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    labels: dict[fx.Node, str | None] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        sources = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
        node = graph.call_function(aten.cat.default, (sources,))
        labels[node] = data.draw(st.sampled_from(["a", "b", None]))
        nodes.append(node)
    graph.output([nodes[-1]])
    for node in nodes:
        node.meta["val"] = torch.empty(2)
    parts = partition(Flow(graph, is_view), labels.__getitem__)
    assert sorted(n.name for p in parts for n in p.nodes) == sorted(n.name for n in labels)
    assert all(len({labels[n] for n in p.nodes}) == 1 for p in parts)
    done: set[fx.Node] = {nodes[0]}
    whole = nx.DiGraph((s, n) for n in labels for s in n.all_input_nodes)
    for part in parts:
        inside = set(part.nodes)
        for node in part.nodes:
            assert all(s in done or s in inside for s in node.all_input_nodes)
        after = set().union(*(nx.descendants(whole, n) for n in inside)) - inside
        before = set().union(*(nx.ancestors(whole, n) for n in inside)) - inside
        assert not after & before
        done |= inside


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def built(**pins: Any) -> tuple[Plan, StepProgram]:
    example = as_batch((torch.randn(4, 8),))
    compiler = Compiler(Model(Net(), None, 2.0), cluster("cpu", pins.pop("devices", 1)), pins)
    chosen = compiler.choose(example)
    return chosen.plan, chosen.program


def test_identical_layers_are_one_model() -> None:
    plan, program = built(ort="all")
    report = program.ort
    assert report is not None
    assert report.placed == report.nodes
    forward = [r for r in report.regions if r.phase == "forward" and "blocks" in r.module]
    assert [r.module for r in forward] == [f"blocks.{i}" for i in range(4)]
    assert len({r.key for r in forward}) == 1
    backward = [r.key for r in report.regions if r.phase == "backward" and "blocks" in r.module]
    assert len(backward) == 4
    assert len(set(backward)) <= 3  # the first and the last read and give other things
    assert Plan.from_json(plan.to_json()) == plan
    targets = {
        n.target.model.key: n.target
        for g in (program.stages[0].forward, *program.stages[0].backwards.values())
        for n in g.graph.nodes
        if "region" in n.name
    }
    assert len({id(t.sessions) for t in targets.values()}) == 1


@pytest.mark.parametrize("pins", [{"pipeline": 2, "microbatches": 2}, {"data": 2}])
def test_sums_of_gradients_and_messages_stay_outside(pins: dict[str, int]) -> None:
    _, program = built(ort="all", devices=2, **pins)
    for stage in program.stages:
        for moment, graph in stage.backwards.items():
            names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
            assert any("ort.region" in n for n in names)
            written = "aten.copy_.default" if moment[0] else "aten.add_.Tensor"
            assert written in names
            assert all(
                n.target is operator.getitem
                or "region" in n.name
                or str(n.target).endswith("_")
                or "_." in str(n.target)
                or is_view(n)
                for n in graph.graph.nodes
                if n.op == "call_function"
            ), names
