"""Mixtures of experts on the expert axis: what travels, and experts that receive nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphaccel.passes.shard_axis import shard_axis
from graphaccel.planner.placements import solve_placements
from tests.graph import test_shard_axis
from tests.graph.test_shard_axis import RATES, captured, check
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
    for name, build in (("capacity", _capacity), ("idle", _idle)):
        monkeypatch.setitem(test_shard_axis.UNEVEN, name, build)


def _parameters(step: Any) -> list[tuple[Any, Any]]:
    nodes = step.graph.graph.find_nodes(op="placeholder")
    return [(n, s) for n, s in zip(nodes, step.inputs, strict=True) if s.kind == "parameter"]


def on_experts(name: str, ranks: int) -> Counter[tuple[str, str]]:
    """(phase, collective) of a model on an expert axis, after comparing it with the whole."""
    step, graph, _ = captured(name)
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis="expert", ranks=ranks, rates=RATES, pins={}
    )
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis="expert", ranks=ranks)
    check(name, made, "expert", ranks)
    three = {s.name for n, s in _parameters(step) if n.meta["val"].dim() == 3}
    assert three, "the experts of a layer lie in one parameter"
    assert all(made.held[n].dim == 0 for n in three), "each rank has its experts"
    return Counter(
        (n.meta["phase"], str(n.target).split(".")[1])
        for n in made.graph.graph.nodes
        if "c10d" in str(n.target) and "wait" not in str(n.target) and n.meta["val"].dim()
    )


def test_tokens_travel_by_all_to_all() -> None:
    """To their experts and back, in both directions: no rank sees the tokens of another."""
    assert on_experts("capacity", 4) == {
        ("forward", "all_to_all_single"): 2,
        ("backward", "all_to_all_single"): 2,
    }


def test_experts_without_tokens() -> None:
    """Nothing depends on how many a rank has: its collectives are the same, its gradients zero."""
    assert on_experts("idle", 2)
