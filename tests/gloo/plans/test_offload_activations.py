"""Activations on the host: the step of one device, bitwise that of the plan without, in less
memory on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.planner.plan.offload import LARGE
from tests.gloo.scripts.test_semantics import furthest
from tests.support.captures import captures_of
from tests.support.parity import peaks_of_a_step, tensors_alive
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

WIDTH, LENGTH, ROWS = 128, 256, 8
PIPELINE = {"data": 1, "pipeline": 2, "interleave": 1, "microbatches": 4, "schedule": "1f1b"}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {"data": 1, "microbatches": 1}),
    "microbatches": (1, {"data": 1, "microbatches": 4}),
    "zero3": (2, {"data": 2, "zero": 3, "microbatches": 2}),
    "tensor": (2, {"data": 1, "tensor": 2, "microbatches": 1}),
    "pipeline": (2, PIPELINE),
    "recomputed": (2, {**PIPELINE, "recompute": ["blocks.1"]}),
    "interleaved": (2, {**PIPELINE, "interleave": 2, "schedule": "interleaved"}),
}


class Block(nn.Module):
    """Attention and a wide middle: values of 0.5 to 2 MiB for each two rows in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm_1(x)).view(rows, length, 3, 4, WIDTH // 4)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Wide(nn.Module):
    """Blocks between an embedding and a head that share their weights."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _made(blocks: int) -> nn.Module:
    torch.manual_seed(5)
    return Wide(blocks).double()


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (ROWS, LENGTH + 1), generator=generator)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for step in range(steps):
        loss = model(**_batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {k: v.clone() for k, v in graphaccel.full_state_dict(model).items()}


@captures_of("offloaded activations")
def _planned(
    world: int, pins: Mapping[str, Any], steps: int, blocks: int = 2
) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    others = [tensor.untyped_storage() for tensor in tensors_alive()]
    model = _made(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = {"pipeline": 1, "recompute": "none", **pins}
    graphaccel.optimize(model, optimizer, devices=world, **wanted)
    losses, state = _train(model, optimizer, steps)
    others += [value.untyped_storage() for value in state.values()]
    device, host = peaks_of_a_step(model, _batch(9), None, others)
    handle = model.graphaccel
    return losses, state, {
        "device": device,
        "host": host,
        "device predicted": handle.predicted_pass_bytes,
        "host predicted": handle.predicted_host_bytes,
    }  # fmt: skip


def _compared(
    world: int, pins: Mapping[str, Any], steps: int
) -> tuple[float, float, bool, dict[str, int], dict[str, int]]:
    """Furthest loss and parameter from eager; whether both are bitwise those of the plan without
    offload; bytes without and with it."""
    plain = _made(2)
    true, right = _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps)
    kept, before, bytes_kept = _planned(world, {**pins, "offload": "none"}, steps)
    away, after, bytes_away = _planned(world, {**pins, "offload": "activations"}, steps)
    same = kept == away and all(torch.equal(before[n], after[n]) for n in before)
    losses = max(abs(a - b) / abs(a) for a, b in zip(true, away, strict=True))
    return losses, furthest(right, after), same, bytes_kept, bytes_away


@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_one_device(pool: Pool, plan: str) -> None:
    world, pins = PLANS[plan]
    steps = 20 if plan == "pipeline" else 2
    found = pool.run(world, _compared, world, pins, steps)
    assert max(away["host"] for *_, away in found) >= LARGE
    for losses, states, same, kept, away in found:
        assert losses <= 1e-10
        assert states <= 1e-9
        assert same
        assert kept["host"] == kept["host predicted"] == 0
        assert away["host predicted"] == pytest.approx(away["host"], rel=0.02)
        assert away["device predicted"] == pytest.approx(away["device"], rel=0.02)
        # a rank whose blocks are computed again has nothing large left
        assert (away["device"] < kept["device"]) == (away["host"] > 0)


def _both(world: int, pins: Mapping[str, Any]) -> tuple[list[float], dict[str, int]]:
    found = _planned(world, {**pins, "offload": "optimizer+activations"}, 3)
    return found[0], found[2]


def test_state_and_activations(pool: Pool) -> None:
    plain = _made(2)
    true, _ = _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 3)
    for losses, held in pool.run(2, _both, 2, PIPELINE):
        assert losses == pytest.approx(true, rel=1e-10)
        assert held["host predicted"] == pytest.approx(held["host"], rel=0.02)
        assert held["device predicted"] == pytest.approx(held["device"], rel=0.02)


def _deep(blocks: int) -> tuple[list[float], dict[str, int]]:
    found = _planned(1, {"data": 1, "microbatches": 4, "offload": "activations"}, 2, blocks)
    return found[0], found[2]


@pytest.mark.release
def test_many_layers_made_of_few(pool: Pool) -> None:
    """Programs of eight blocks are repeated from those of three and four."""
    plain = _made(8)
    true, _ = _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 2)
    ((losses, held),) = pool.run(1, _deep, 8)
    assert losses == pytest.approx(true, rel=1e-10)
    assert held["host predicted"] == pytest.approx(held["host"], rel=0.02)
    assert held["device predicted"] == pytest.approx(held["device"], rel=0.02)
