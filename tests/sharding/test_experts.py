"""Mixtures of experts on the expert axis: what travels, and experts that receive nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F

from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.model import as_batch
from graphaccel.kernels.ops.expert_rows import EXCHANGE
from graphaccel.kernels.ops.experts import GRADIENT, GROUPED_MATMUL
from graphaccel.planner.profile.cost import node_flops
from graphaccel.sharding.apply.shard_axis import shard_axis
from graphaccel.sharding.rules.ops.collectives import is_message
from graphaccel.sharding.solve.placements import solve_placements
from tests.sharding import test_shard_axis
from tests.sharding.test_shard_axis import RATES, captured, check
from tests.support.zoo import ALL

BATCH, TOKENS, WIDTH, EXPERTS, SEATS = 8, 16, 64, 4, 4  # as many seats as tokens


class Capacity(nn.Module):
    """Experts with a fixed number of seats for the tokens of an example, sent by products.

    Lepikhin et al., GShard, 2020, algorithm 1, with the best expert alone. Inputs [B, T, WIDTH].
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weight = self.gate(x).softmax(-1)
        chosen = F.one_hot(weight.argmax(-1), EXPERTS).to(x.dtype)
        seat = ((chosen.cumsum(1) - 1) * chosen).sum(-1).long().clamp(max=SEATS)
        seats = F.one_hot(seat, SEATS + 1).to(x.dtype)[..., :-1]  # who comes too late has none
        sent = chosen[..., None] * seats[:, :, None, :]
        given = torch.einsum("btec,btd->ebcd", sent, x)
        inner = torch.relu(torch.einsum("ebcd,edf->ebcf", given, self.up))
        made = torch.einsum("ebcf,efd->ebcd", inner, self.down)
        back = torch.einsum("btec,ebcd->btd", sent * weight[..., None], made)
        return ((x + back - y) ** 2).sum()


class Odd(nn.Module):
    """An expert for every token but the first of all: rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.flatten(0, 1)[1:]
        best = self.gate(rows).softmax(-1).max(-1)
        made = torch.bmm(rows[:, None], self.up[best.indices])[:, 0] * best.values[:, None]
        return ((torch.tanh(made) - y.flatten(0, 1)[1:]) ** 2).sum()


def _odd() -> tuple[nn.Module, Any, None]:
    torch.manual_seed(0)
    shape = (BATCH, TOKENS, WIDTH)
    return Odd(), (torch.randn(shape), torch.randn(shape)), None


def _capacity() -> tuple[nn.Module, Any, None]:
    torch.manual_seed(0)
    shape = (BATCH, TOKENS, WIDTH)
    return Capacity(), (torch.randn(shape), torch.randn(shape)), None


def _idle() -> tuple[nn.Module, Any, None]:
    """Every token chooses the first two experts, which lie on the first rank of two."""
    model, batch, loss_fn = ALL["mixtral"].build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.zero_()
    return model, batch, loss_fn


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `captured` builds by these names."""
    for name, build in (("capacity", _capacity), ("idle", _idle), ("odd", _odd)):
        monkeypatch.setitem(test_shard_axis.UNEVEN, name, build)


def flops(node: fx.Node) -> float:
    """Of a call of concrete sizes."""
    node.meta["dims"] = tuple(node.meta["val"].shape)
    for source in node.all_input_nodes:
        source.meta["dims"] = tuple(source.meta["val"].shape)
    return float(node_flops(node))


def _parameters(step: Any) -> list[tuple[Any, Any]]:
    nodes = step.graph.graph.find_nodes(op="placeholder")
    return [(n, s) for n, s in zip(nodes, step.inputs, strict=True) if s.kind == "parameter"]


def on_experts(name: str, ranks: int) -> tuple[fx.Graph, fx.Graph]:
    """A model's whole graph and that of a rank of the expert axis, compared in float64."""
    step, graph, _ = captured(name)
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis="expert", ranks=ranks, rates=RATES, pins={}
    )
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="expert", ranks=ranks)
    check(name, made, "expert", ranks)
    three = {s.name for n, s in _parameters(step) if n.meta["val"].dim() == 3}
    assert three, "the experts of a layer lie in one parameter"
    assert all(made.held[n].dim == 0 for n in three), "each rank has its experts"
    return graph.graph, made.graph.graph


def sent(graph: fx.Graph, module: str = "") -> list[fx.Node]:
    """The collectives that a module sends tensors by."""
    return [
        n for n in graph.nodes
        if is_message(n.target) and "wait" not in str(n.target) and n.meta["val"].dim()
        and module in n.meta["module"]
    ]  # fmt: skip


def test_tokens_travel_by_all_to_all() -> None:
    """To their experts and back, in both directions: no rank sees the tokens of another."""
    _, graph = on_experts("capacity", 4)
    assert Counter((n.meta["phase"], str(n.target).split(".")[1]) for n in sent(graph)) == {
        ("forward", "all_to_all_single"): 2,
        ("backward", "all_to_all_single"): 2,
    }


def test_experts_multiply_the_tokens_that_chose_them() -> None:
    """As Hugging Face writes them, with one rank's experts receiving no token: collectives do not
    depend on it, gradients are zero. Half of the work each where tokens are spread evenly."""
    whole, graph = on_experts("idle", 2)
    ops = {str(GROUPED_MATMUL), str(GRADIENT)}
    work = [sum(flops(n) for n in g.nodes if str(n.target) in ops) for g in (whole, graph)]
    assert work[0] == 2 * work[1] > 0
    tokens, width, choices = 8 * 16, 32, 2
    layer = sent(graph, "layers.1.mlp")
    rows = [n for n in layer if n.meta["val"].is_floating_point()]
    # Each row to the rank of its expert and back; nothing but what was chosen is sent to all.
    assert Counter((n.meta["phase"], n.target) for n in rows) == {
        ("forward", EXCHANGE): 2,
        ("backward", EXCHANGE): 2,
    }
    assert all(n.meta["val"].shape == (tokens * choices // 2, width) for n in rows)
    (chosen,) = (n for n in layer if n not in rows)
    assert chosen.meta["val"].shape == (tokens * choices,)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_that_the_ranks_do_not_divide(ranks: int) -> None:
    """They are whole on every rank: each takes those of its experts, and shares add up."""
    _, graph = on_experts("odd", ranks)
    assert not [n for n in graph.nodes if n.target is EXCHANGE]
    assert [n for n in graph.nodes if n.target is GROUPED_MATMUL and n.args[0].meta.get("chosen")]


@pytest.mark.parametrize("written", ["eager", "grouped_mm"])
def test_other_ways_to_write_the_same_experts(written: str) -> None:
    """The loop over experts that were hit, and the sorted batch, are captured as products too."""
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(written)
    ids = torch.arange(12).reshape(2, 6)
    batch = as_batch({"input_ids": ids, "labels": ids})
    step = capture(model, batch, symbolic=False)
    assert sum(n.target is GROUPED_MATMUL for n in step.forward.graph.graph.nodes) == 2
    assert model.config._experts_implementation == written
    true = model(input_ids=ids, labels=ids).loss
    true.backward()
    named = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    values = [
        named[s.name].detach() if s.kind == "parameter"
        else buffers[s.name] if s.kind == "buffer"
        else step.forward.constants[s.name] if s.kind == "constant"
        else batch.leaves[s.leaf]
        for s in step.inputs
    ]  # fmt: skip
    found = dict(zip(step.outputs, step.graph(*values), strict=True))
    for spec, value in found.items():
        if spec.kind == "loss":
            assert value.item() == pytest.approx(true.item(), rel=1e-6)
        elif spec.kind == "gradient":
            torch.testing.assert_close(value, named[spec.name].grad, rtol=1e-4, atol=1e-6)
