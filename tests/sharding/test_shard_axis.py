"""Graphs sharded over one axis against the whole graph, all ranks run side by side in float64.

Two ways to choose placements: the solver's, and at random: any placement that the rows allow must
give the same loss and gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, fx, nn

from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.model import as_batch
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.shard_axis import ShardedGraph, shard_axis
from graphaccel.sharding.rules.shard import Row, Shard, shard_of
from graphaccel.sharding.solve.head_parallel import HeadsDoNotDivide
from graphaccel.sharding.solve.placements import PlacementProblem, Rates, solve_placements
from graphaccel.sharding.solve.shardable import Shardable
from tests.support.casts import lift_loss_cast
from tests.support.gpt import GPT
from tests.support.lockstep import part_of, run_ranks, whole_of
from tests.support.zoo import ALL, double

RATES = Rates(flops=1e13, memory=1e12, launch=1e-9, bandwidth=1e11, latency=1e-9)
MODELS = ("gpt", "gpt2", "bert", "t5", "llama", "vit", "swin", "resnet", "mixtral")


def _uneven_gpt() -> tuple[nn.Module, Any, None]:
    """A vocabulary that no axis divides, with a bias, in a scaled and soft-capped head."""
    torch.manual_seed(0)
    model = GPT(vocabulary=97, layers=1, deviation=0.15)
    model.head.bias = nn.Parameter(torch.randn(97) * 0.1)
    model.head.register_forward_hook(lambda _m, _a, out: 3.0 * torch.tanh(out / 3.0))
    return model, ALL["gpt"].build()[1], None


def _uneven_llama() -> tuple[nn.Module, Any, None]:
    """An odd vocabulary and an odd inner width."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=67, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, initializer_range=0.15,
        mlp_bias=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), ALL["llama"].build()[1], None


class Summed(nn.Module):
    """An odd inner width that is summed over, after what is not zero at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 37), nn.Linear(37, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = torch.sigmoid(self.up(x))
        return (self.down(inner) * y).sum() + (inner.sum(-1) ** 2).sum()


class Adapted(nn.Module):
    """Weights whose gradients are read to make others, or are those of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(16, 16))
        self.left, self.right = (nn.Parameter(torch.randn(s)) for s in ((16, 4), (4, 16)))
        self.one, self.two = (nn.Parameter(torch.randn(8, 16)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = torch.sigmoid(nn.functional.linear(x, self.base + self.left @ self.right))
        inner = torch.sigmoid(inner @ self.base) + self.one + self.two
        return (inner * y).sum()


def _adapted() -> tuple[nn.Module, Any, None]:
    torch.manual_seed(0)
    return Adapted(), (torch.randn(8, 16), torch.randn(8, 16)), None


def _uneven_sum() -> tuple[nn.Module, Any, None]:
    torch.manual_seed(0)
    return Summed(), (torch.randn(8, 16), torch.randn(8, 16)), None


UNEVEN = {"uneven gpt": _uneven_gpt, "uneven llama": _uneven_llama, "uneven sum": _uneven_sum}

PINNED = {
    "uneven sum": lambda ranks: {
        "up.weight": shard_of(0, 1, (37, 16), ranks),
        "down.weight": shard_of(1, 1, (16, 37), ranks),
    }
}


@cache
def captured(name: str) -> tuple[StepGraph, fx.GraphModule, list[Any]]:
    """A model's step on the whole batch, and the values of its placeholders."""
    with lift_loss_cast():
        model, batch, loss_fn = UNEVEN[name]() if name in UNEVEN else ALL[name].build()
        model, batch = double(model, batch)
        leaves = as_batch(batch)
        step = capture(model, leaves, loss_fn)
    held = {
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "constant": step.forward.constants,
    }
    values = [
        leaves.leaves[s.leaf] if s.kind == "batch" else held[s.kind][s.name].detach()
        for s in step.inputs
    ]
    return step, exact_microbatch(step, Plan(devices=1, batch=8)).graph, values


def check(name: str, made: ShardedGraph, axis: str, ranks: int) -> None:
    """Loss and every gradient of all ranks together are those of the whole graph."""
    step, whole, values = captured(name)
    inputs = [
        [
            part_of(v, made.held[s.name], ranks, rank) if s.name in made.held else v
            for v, s in zip(values, step.inputs, strict=True)
        ]
        for rank in range(ranks)
    ]
    with torch.no_grad():
        wanted = whole(*values)
        got = run_ranks(made.graph.graph, inputs, [{axis: rank} for rank in range(ranks)])
    largest = max(
        float(w.abs().max())
        for w, s in zip(wanted, step.outputs, strict=True)
        if s.kind == "gradient"
    )
    for i, (true, spec) in enumerate(zip(wanted, step.outputs, strict=True)):
        if spec.kind == "output":
            continue
        result = _joined(spec.name, [r[i] for r in got], made, gradient=spec.kind == "gradient")
        error = float((result - true).abs().max())
        assert error <= 1e-10 * max(float(true.abs().max()), 1e-4 * largest), (spec, error)


def _joined(name: str, parts: list[Tensor], made: ShardedGraph, *, gradient: bool) -> Tensor:
    if gradient and name in made.partial:
        return torch.stack(parts).sum(0)
    if gradient and name in made.held:
        return whole_of(parts, made.held[name])
    for other in parts[1:]:
        assert torch.equal(other, parts[0]), f"{name} differs between ranks"
    return parts[0]


OTHERS = (("tensor", 4), ("context", 2), ("expert", 2))
CASES = [(name, "tensor", 2) for name in MODELS]
CASES += [(name, *OTHERS[i % 3]) for i, name in enumerate(MODELS)]
AT_RANDOM = [(name, ("tensor", "context", "expert")[i % 3], i) for i, name in enumerate(MODELS)]
AT_RANDOM += [(name, "tensor", 1) for name in ("bert", "t5", "vit", "swin", "mixtral")]


@pytest.mark.parametrize(("name", "axis", "ranks"), CASES)
def test_solved(name: str, axis: str, ranks: int) -> None:
    step, graph, _ = captured(name)
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis=axis, ranks=ranks, rates=RATES, pins={}
    )
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis=axis, ranks=ranks)
    if axis == "tensor" and ranks == 2:
        assert made.held, "nothing was sharded"
    if axis == "expert" and name == "mixtral":
        assert sum("experts" in held for held in made.held) == 8, "experts of four layers"
    check(name, made, axis, ranks)


def _three_heads() -> tuple[nn.Module, Any, None]:
    torch.manual_seed(0)
    return GPT(width=48, heads=3, layers=1, deviation=0.15), ALL["gpt"].build()[1], None


def test_heads_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is then split along its queries, as on the context axis, where work is dear."""
    monkeypatch.setitem(UNEVEN, "three heads", _three_heads)
    step, graph, _ = captured("three heads")
    rates = replace(RATES, flops=1e6, bandwidth=1e14)
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis="tensor", ranks=4, rates=rates, pins={}
    )
    attention = [n for n in placed.rows if "attention" in str(n.target)]
    assert [placed.rows[n].lowering for n in attention] == ["causal", "causal"]
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="tensor", ranks=4)
    check("three heads", made, "tensor", 4)


def _shared_keys() -> tuple[nn.Module, Any, None]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=ALL["llama"].build()[0].config.vocab_size, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, use_cache=False,
        initializer_range=0.15,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), ALL["llama"].build()[1], None


@pytest.mark.parametrize(("ranks", "inner"), [(2, 1), (2, 2), (4, 1)])
def test_attention_by_heads(monkeypatch: pytest.MonkeyPatch, ranks: int, inner: int) -> None:
    """Of several queries for one head of keys, and of as many parts of the heads as the tensor axis
    will have ranks; keys are sent before they are repeated."""
    monkeypatch.setitem(UNEVEN, "shared keys", _shared_keys)
    step, graph, _ = captured("shared keys")
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis="context", ranks=ranks, rates=RATES, pins={},
        context_by="heads", inner=inner,
    )  # fmt: skip
    attention = [n for n in placed.rows if "attention" in str(n.target)]
    assert {placed.rows[n].inputs[0] for n in attention} == {Shard(1, inner)}
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="context", ranks=ranks)
    sent = Counter(
        n.args[0].meta["val"].numel()
        for n in made.graph.graph.nodes
        if "all_to_all" in str(n.target)
    )
    queries = 8 * 16 * 32 // ranks  # examples x tokens x width
    assert sent == {queries: 2 * 4, queries // 2: 2 * 4}
    check("shared keys", made, "context", ranks)


def test_heads_that_do_not_divide_on_the_context_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNEVEN, "shared keys", _shared_keys)
    step, graph, _ = captured("shared keys")
    with pytest.raises(HeadsDoNotDivide, match="context=4 x tensor=2"):
        solve_placements(
            graph.graph, step.inputs, step.outputs, axis="context", ranks=4, rates=RATES, pins={},
            context_by="heads", inner=2,
        )  # fmt: skip


class _AtRandom(PlacementProblem):
    """Costs drawn at random: what is forbidden stays so."""

    generator: np.random.Generator

    def row_seconds(self, node: fx.Node, row: Row, work: float) -> float:
        return float(self.generator.random())

    def conversion_seconds(self, *args: Any) -> float:
        known = super().conversion_seconds(*args)
        return known if np.isinf(known) else float(self.generator.random()) * 0.2


@pytest.mark.parametrize(("name", "axis", "seed"), AT_RANDOM)
def test_any_placement(name: str, axis: str, seed: int) -> None:
    step, graph, _ = captured(name)
    space = Shardable(graph.graph, step.inputs, step.outputs, axis, 2, {}, True).spread()
    problem = _AtRandom(space, RATES)
    problem.generator = np.random.default_rng(seed)
    made = shard_axis(graph, step.inputs, step.outputs, problem.solve(), axis=axis, ranks=2)
    check(name, made, axis, 2)


@pytest.mark.parametrize(("name", "ranks"), [(name, n) for name in UNEVEN for n in (2, 4)])
def test_uneven_dims_are_padded(name: str, ranks: int) -> None:
    step, graph, _ = captured(name)
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs,
        axis="tensor", ranks=ranks, rates=RATES, pins=PINNED.get(name, lambda _: {})(ranks),
    )  # fmt: skip
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="tensor", ranks=ranks)
    padded = {held: shard for held, shard in made.held.items() if shard.padding}
    wanted = {
        "uneven gpt": {"token.weight", "head.bias"},
        "uneven llama": {"lm_head.weight"}
        | {f"model.layers.0.mlp.{n}_proj.{w}" for n in ("gate", "up") for w in ("weight", "bias")},
        "uneven sum": {"up.weight", "down.weight"},
    }
    assert set(padded) >= wanted[name]
    check(name, made, "tensor", ranks)


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in UNEVEN for seed in (0, 1)])
def test_any_uneven_placement(name: str, seed: int) -> None:
    step, graph, _ = captured(name)
    problem = _AtRandom(
        Shardable(graph.graph, step.inputs, step.outputs, "tensor", 2, {}, True).spread(), RATES
    )
    problem.generator = np.random.default_rng(seed)
    made = shard_axis(graph, step.inputs, step.outputs, problem.solve(), axis="tensor", ranks=2)
    check(name, made, "tensor", 2)


def test_gradients_are_gathered_where_they_are_made() -> None:
    """Gathered at the end, they would keep what is sent beside them alive until then."""
    step, graph, _ = captured("bert")
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis="tensor", ranks=2, rates=RATES, pins={}
    )
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="tensor", ranks=2)
    nodes = list(made.graph.graph.nodes)
    results = [
        n
        for n, spec in zip(made.graph.graph.output_node().args[0], step.outputs, strict=True)
        if spec.kind == "gradient" and n.target is torch.ops._c10d_functional.wait_tensor.default
    ]
    assert results, "no gradient is communicated"
    for wait in results:
        (sent,) = wait.all_input_nodes
        (own,) = sent.all_input_nodes
        assert nodes.index(wait) - nodes.index(own) == 2, wait


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_are_read_themselves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNEVEN, "adapted", _adapted)
    step, graph, _ = captured("adapted")
    problem = _AtRandom(
        Shardable(graph.graph, step.inputs, step.outputs, "tensor", 2, {}, True).spread(), RATES
    )
    problem.generator = np.random.default_rng(seed)
    made = shard_axis(graph, step.inputs, step.outputs, problem.solve(), axis="tensor", ranks=2)
    check("adapted", made, "tensor", 2)
