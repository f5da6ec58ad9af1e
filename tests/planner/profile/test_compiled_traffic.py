"""`planner.profile.compiled_traffic`: what calls read and write that Inductor compiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import networkx as nx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.compiled_traffic import compiled_traffic, compiled_work, kernels_of
from graphaccel.planner.profile.cost import Sizes, node_work
from graphaccel.planner.profile.profile import Profile

aten = torch.ops.aten
ROWS, WIDTH = 16, 8


def value(rows: int = ROWS, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(rows, width, dtype=dtype, device="meta")


class Built:
    """A graph of calls on the meta device, with the sizes of their results."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def given(self, name: str, like: Tensor) -> fx.Node:
        return self._described(self.graph.placeholder(name), like)

    def call(
        self, op: Callable, *args: object, phase: str = "forward", **kwargs: object
    ) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["phase"] = phase
        return self._described(node, op(*values[0], **values[1]))

    def _described(self, node: fx.Node, like: Tensor) -> fx.Node:
        node.meta |= {"val": like, "dims": tuple(like.shape)}
        return node


def moved(graph: fx.Graph) -> dict[str, int]:
    """Bytes by call, for calls of kernels."""
    return {
        node.name: compiled_work(node, traffic, Sizes({})).bytes
        for node, traffic in compiled_traffic(graph.nodes).items()
    }


def test_a_norm_reads_its_input_once_and_writes_its_result() -> None:
    built = Built()
    x, w = built.given("x", value(dtype=torch.bfloat16)), built.given("w", value(WIDTH, 4))
    wide = built.call(aten._to_copy.default, x, dtype=torch.float32)
    square = built.call(aten.mul.Tensor, wide, wide)
    mean = built.call(aten.mean.dim, square, [-1], True)
    normed = built.call(aten.mul.Tensor, wide, mean)
    product = built.call(aten.mm.default, normed, w)
    built.graph.output(product)
    bytes_of = moved(built.graph)
    number = ROWS * WIDTH
    assert list(bytes_of.values()) == [2 * number, 0, 0, 4 * number]
    traffic = compiled_traffic(built.graph.nodes)
    assert product not in traffic
    assert sum(t.starts for t in traffic.values()) == 1


def test_a_sum_over_rows_is_a_kernel_of_its_own() -> None:
    built = Built()
    doubled = built.call(aten.mul.Tensor, built.given("x", value()), 2.0)
    rows = built.call(aten.sum.dim_IntList, doubled, [0])
    built.graph.output(rows)
    assert rows not in compiled_traffic(built.graph.nodes)
    assert moved(built.graph) == {doubled.name: 2 * 4 * ROWS * WIDTH}


def test_a_residual_around_a_matmul_is_written_and_read() -> None:
    built = Built()
    x, w = built.given("x", value()), built.given("w", value(WIDTH, WIDTH))
    first = built.call(aten.add.Tensor, x, 1.0)
    product = built.call(aten.mm.default, built.call(aten.tanh.default, first), w)
    last = built.call(aten.add.Tensor, first, product)
    built.graph.output(last)
    traffic = compiled_traffic(built.graph.nodes)
    assert traffic[first].written
    assert traffic[last].read == (0, 1)
    assert traffic[last].starts


def test_phases_are_kernels_apart() -> None:
    built = Built()
    ahead = built.call(aten.tanh.default, built.given("x", value()))
    back = built.call(aten.mul.Tensor, ahead, 2.0, phase="backward")
    built.graph.output(back)
    traffic = compiled_traffic(built.graph.nodes)
    assert traffic[ahead].written
    assert traffic[back].read == (0,)


KINDS = st.sampled_from(["add", "mm", "view", "rows", "columns"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(KINDS, st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=14))
def test_kernels_never_wait_for_themselves_and_lose_no_value(
    calls: list[tuple[str, int, int]],
) -> None:
    built = Built()
    known = [built.given("x", value()), built.given("y", value())]
    w = built.given("w", value(WIDTH, WIDTH))
    for kind, one, other in calls:
        a, b = known[one % len(known)], known[other % len(known)]
        if kind == "add":
            known.append(built.call(aten.add.Tensor, a, b))
        elif kind == "mm":
            known.append(built.call(aten.mm.default, a, w))
        elif kind == "view":
            known.append(built.call(aten.view.default, a, [ROWS, WIDTH]))
        else:
            mean = built.call(aten.mean.dim, a, [-1 if kind == "rows" else 0], True)
            known.append(built.call(aten.mul.Tensor, b, mean))
    built.graph.output(known[-1])
    kernels, traffic = kernels_of(built.graph), compiled_traffic(built.graph.nodes)
    waits: nx.DiGraph = nx.DiGraph()
    read = Counter[tuple[fx.Node, fx.Node]]()
    for node in built.graph.nodes:
        own = kernels.get(node, node)
        for i, source in enumerate(node.all_input_nodes):
            while source.target is aten.view.default:
                source = source.all_input_nodes[0]
            if node.target is aten.view.default or kernels.get(source, source) is own:
                continue
            waits.add_edge(kernels.get(source, source), own)
            assert source not in traffic or traffic[source].written
            if node in traffic:
                read[own, source] += i in traffic[node].read
    assert nx.is_directed_acyclic_graph(waits), "a kernel waits for itself"
    assert set(read.values()) == ({1} if read else set()), "a kernel reads a value once"


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.one(torch.nn.functional.layer_norm(x, [32])))
        return torch.nn.functional.silu(self.other(h) * 2 + x).square().mean()


def test_a_compiled_step_is_predicted_faster_and_starts_fewer_kernels() -> None:
    step, where = capture(Norms(), as_batch(torch.randn(8, 32))), cluster("h100-80gb", 1)
    plain, compiled = (Profile(step, compiled=c).sized(8, where.device) for c in (False, True))
    assert compiled.work < plain.work
    assert compiled.launches < plain.launches
    nodes = step.graph.graph.nodes
    traffic, sizes = compiled_traffic(nodes), Sizes(step.sizes)
    for node, part in traffic.items():
        assert compiled_work(node, part, sizes).bytes <= node_work(node, sizes).bytes


def test_a_gpu_is_planned_compiled_and_a_cpu_is_not() -> None:
    model, batch = Model(Norms(), None, 2.0), as_batch(torch.randn(8, 32))
    pins: dict[str, Any] = {}
    plans: list[Plan] = []
    for device in ("h100-80gb", "cpu"):
        plans.append(Compiler(model, cluster(device, 1), pins).choose(batch).plan)
    assert [(p.compile, p.min_cut) for p in plans] == [("inductor", True), ("off", False)]
    off = {"compile": "off", "fusions": "off"}
    plain = Compiler(model, cluster("h100-80gb", 1), off).choose(batch).plan
    assert (plain.compile, plain.min_cut, plain.fusions) == ("off", False, ())
    assert plans[0].prediction is not None
    assert plain.prediction is not None
    assert plans[0].prediction.seconds < plain.prediction.seconds
    given = Compiler(model, cluster("h100-80gb", 1), {}, plans[0])
    layouts = given.layouts(given.capture(batch)[0])
    assert layouts.whole.compiled, "a plan from a file is profiled as it runs"
