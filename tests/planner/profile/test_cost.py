"""FLOPs, bytes and seconds of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.passes.fusion.fuse import fuse
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.cluster.cluster import Device, OpTime
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.profile.cost import (
    Sizes,
    dims_of,
    is_view,
    left_readers,
    node_bytes,
    node_flops,
    node_seconds,
    node_work,
    step_flops,
)
from graphaccel.planner.profile.efficiency import Work, seconds_of
from graphaccel.planner.profile.profile import Profile
from tests.support.zoo import ZOO, call, loss_of

aten = torch.ops.aten
Captured = Callable[[str], StepGraph]
DEVICE = Device("test", 1 << 30, {"float32": 1e12, "bfloat16": 4e12}, 1e9, 1e-6)


def attention(query: Any, key: Any, *_: Any, **__: Any) -> int:
    """FLOPs of softmax(q k^T) v: two products."""
    batch, heads, queries, width = query
    return 2 * 2 * batch * heads * queries * key[2] * width


def attention_backward(_gradient: Any, query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Five products: the scores again, and one for each of dv, d(scores), dq, dk."""
    return attention(query, key) * 5 // 2


# torch counts no FLOPs for its CPU attention.
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


def eager_flops(name: str, rows: int | None = None) -> int:
    """FLOPs torch counts while the model runs on the first `rows` rows of its batch."""
    model, batch, loss_fn = ZOO[name].build()
    if rows is not None:
        batch = {key: value[:rows] for key, value in dict(batch).items()}
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        loss_of(call(model, batch), batch, loss_fn).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt", "gpt2", "t5", "vit", "resnet"])
def test_flops_are_those_that_torch_counts(captured: Captured, name: str) -> None:
    step = captured(name)
    assert Sizes(step.sizes)(step_flops(step.graph.graph)) == eager_flops(name)


def test_flops_hold_at_a_size_that_was_not_captured(captured: Captured) -> None:
    step = captured("gpt2")
    sizes = Sizes({**step.sizes, BATCH: 3})
    assert sizes(step_flops(step.graph.graph)) == eager_flops("gpt2", rows=3)


def test_attention_counts_like_its_two_products(captured: Captured) -> None:
    step = captured("gpt")
    forward = [n for n in step.graph.graph.nodes if n.meta.get("phase") == "forward"]
    counted = sum(node_flops(n, Sizes(step.sizes)) for n in forward)
    model, batch, _ = ZOO["gpt"].build()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call(model, batch)
    assert counted == counter.get_total_flops()


def node_of(step: StepGraph, target: Any) -> Any:
    return next(n for n in step.graph.graph.nodes if n.target is target)


def test_bytes_of_a_product(captured: Captured) -> None:
    step = captured("gpt")
    node = node_of(step, aten.addmm.default)  # [b*s, 32] x [32, 96] + [96]
    b, s = sorted(step.sizes, key=str)
    assert node_bytes(node) == 4 * (96 + b * s * 32 + 32 * 96 + b * s * 96)
    assert node_bytes(node, Sizes({b: 2, s: 8})) == 4 * (96 + 16 * 32 + 32 * 96 + 16 * 96)


def test_a_lookup_reads_only_the_rows_it_gives(captured: Captured) -> None:
    step = captured("gpt")
    node = node_of(step, aten.embedding.default)  # 8 x 16 rows of 32 floats, int64 indices
    assert node_bytes(node, Sizes(step.sizes)) == 2 * 8 * 16 * 32 * 4 + 8 * 16 * 8


def test_views_are_free(captured: Captured) -> None:
    views = [n for n in captured("gpt").graph.graph.nodes if is_view(n)]
    assert {str(n.target) for n in views} >= {"aten.reshape.default", "aten.t.default"}
    assert all(node_seconds(n, DEVICE, Sizes({})) == 0.0 for n in views)
    assert all(node_bytes(n) == 0 for n in views)


def test_halving_the_batch_does_not_halve_the_floor(captured: Captured) -> None:
    step = captured("gpt")
    node = node_of(step, aten.gelu.default)
    whole, half = (node_seconds(node, DEVICE, Sizes({**step.sizes, BATCH: n})) for n in (8, 4))
    assert whole == pytest.approx(2 * 8 * 16 * 128 * 4 / 1e9 + 1e-6)
    assert half == pytest.approx(8 * 16 * 128 * 4 / 1e9 + 1e-6)


def test_lower_precision_halves_bytes_and_uses_its_peak(captured: Captured) -> None:
    step = captured("gpt")
    sizes = Sizes(step.sizes)
    slow_memory = Device("test", 1, {"float32": 1.0, "bfloat16": 4.0}, 1e30, 0.0)
    low = {kind: lower_precision(step, Plan(1, precision=Precision(kind)))
           for kind in ("bfloat16", "float16")}  # fmt: skip
    gelu = node_bytes(node_of(step, aten.gelu.default), sizes)
    assert node_bytes(node_of(low["bfloat16"], aten.gelu.default), sizes) * 2 == gelu
    product = node_seconds(node_of(step, aten.addmm.default), slow_memory, sizes)
    seconds = {kind: node_seconds(node_of(made, aten.addmm.default), slow_memory, sizes)
               for kind, made in low.items()}  # fmt: skip
    # No float16 entry: no fast path, so it runs as float32.
    assert seconds == pytest.approx({"bfloat16": product / 4, "float16": product})


def test_causal_attention_does_half(captured: Captured) -> None:
    step = captured("gpt")
    node = next(n for n in step.graph.graph.nodes if "flash_attention" in str(n.target))
    work = node_work(node, Sizes(step.sizes))
    counted = node_flops(node, Sizes(step.sizes))
    length = work.rows
    assert work.kind == "attention"
    assert work.flops == int(counted * (length + 1) / (2 * length))


def test_a_fused_head_counts_its_products(captured: Captured) -> None:
    step = fuse(captured("llama"), Plan(1, fusions=("linear_cross_entropy",)))
    node = next(n for n in step.graph.graph.nodes if "linear_cross" in str(n.target))
    sizes = Sizes(step.sizes)
    (*_, width), (vocabulary, _) = (dims_of(n, sizes) for n in node.all_input_nodes[:2])
    tokens = math.prod(dims_of(node.args[0], sizes)) // width
    work = node_work(node, sizes, tokens)
    assert work.flops == 6 * tokens * vocabulary * width == node_flops(node, sizes)
    assert [(p.rows, p.columns, p.inner) for p in work.parts[:3]] == [
        (tokens, vocabulary, width), (tokens, width, vocabulary), (vocabulary, width, tokens)
    ]  # fmt: skip
    halves = node_work(node, sizes, tokens // 2)
    assert halves.times == 2
    assert halves.flops == work.flops
    # Two products read the weight again, one writes its gradient, and adding that up reads and
    # writes it.
    assert halves.bytes - work.bytes == 5 * 4 * vocabulary * width


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "aligned"),
    [
        (64, 51, torch.bfloat16, 2),  # of the result
        (64, 50, torch.bfloat16, 4),
        (63, 48, torch.bfloat16, 16),  # rows are 96 and 48 long, how many there are is all one
        (64, 51, torch.float32, 16),
    ],
)
def test_how_rows_are_aligned_is_told(
    rows: int, columns: int, dtype: torch.dtype, aligned: int
) -> None:
    graph = fx.Graph()
    left, right = (graph.placeholder(name) for name in "ab")
    node = graph.call_function(aten.mm.default, (left, right))
    weight = torch.empty(columns, 96, dtype=dtype, device="meta")
    left.meta["val"] = torch.empty(rows, 96, dtype=dtype, device="meta")
    right.meta["val"] = weight.t()
    node.meta["val"] = left.meta["val"] @ right.meta["val"]
    for each in graph.nodes:
        each.meta["dims"] = tuple(each.meta["val"].shape)
    assert node_work(node, Sizes({})).aligned == aligned


def test_nodes_of_a_kind_ask_the_same(captured: Captured) -> None:
    profile = Profile(captured("gpt"))
    kinds, first = profile.node_kinds
    sizes = Sizes({**profile.step.sizes, BATCH: 3})
    assert len(first) < len(profile.nodes) / 3
    for kind, node in zip(kinds, profile.nodes, strict=True):
        assert node_work(node, sizes) == node_work(first[kind], sizes)


def test_what_was_measured_is_taken() -> None:
    """The call most like it decides, as much longer as it does more; ops not met are a roofline."""
    wide = OpTime("product", "float32", 200, 0, 10, 10, 1, 1, 4e-6)
    tall = OpTime("product", "float32", 200, 0, 100, 1, 1, 1, 9e-6)
    other = OpTime("aten.tanh", "float32", 0, 80, seconds=3e-6)
    device = replace(DEVICE, measured=(wide, tall, other))
    product = Work("product", 400, 0, rows=20, columns=10, inner=1)
    assert seconds_of(product, device) == pytest.approx(1e-6 + 2 * 3e-6 - 1e-6)
    tanh = Work(bytes=160, op="aten.tanh")
    assert seconds_of(tanh, device) == pytest.approx(1e-6 + 2 * 2e-6 - 1e-6)
    assert seconds_of(replace(tanh, op="aten.exp"), device) == seconds_of(tanh, DEVICE)
    low = replace(product, dtype="bfloat16")
    assert seconds_of(low, device) == seconds_of(low, DEVICE)


def test_what_several_products_read_is_cast_once() -> None:
    """Queries, keys and values of one input; a weight's gradient has it too, transposed."""
    graph = fx.Graph()
    x, q, k, v = (graph.placeholder(name) for name in "xqkv")
    flat, again = (graph.call_function(aten.view.default, (x, [8, 4])) for _ in range(2))
    products = [graph.call_function(aten.mm.default, (flat, w)) for w in (q, k)]
    products.append(graph.call_function(aten.mm.default, (again, v)))
    turned = graph.call_function(aten.t.default, (flat,))
    products.append(graph.call_function(aten.mm.default, (turned, products[-1])))
    assert [left_readers(node) for node in products] == [4, 4, 4, 4]
    alone = graph.call_function(aten.mm.default, (products[0], v))
    assert (left_readers(alone), left_readers(x)) == (1, 1)
