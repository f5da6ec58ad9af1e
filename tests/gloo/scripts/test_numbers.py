"""What a plan may change: precision and random numbers, and how far, under two ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.runtime.parameters.remote import RemoteTensor
from tests.gloo.scripts.test_semantics import IDS, PLANS, tokens
from tests.support.captures import captures_of
from tests.support.gpt import GPT
from tests.support.pool import Pool
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess


# --- precision ------------------------------------------------------------------------------------


@captures_of("low precision")
def _low(precision: str, pins: Mapping[str, Any]) -> tuple[float, float, set[torch.dtype]]:
    torch.manual_seed(7)
    model = GPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graphaccel.optimize(model, optimizer, devices=2, precision=precision, **pins)
    losses = []
    for _ in range(15):
        loss = model(**tokens())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1], {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(pool: Pool, precision: str, pins: dict[str, Any]) -> None:
    for first, last, kinds in pool.run(2, _low, precision, pins):
        assert last < 0.8 * first
        assert kinds == {torch.float32}


class Loud(nn.Module):
    """Gradients of its first layer overflow fp16 as long as the loss scale is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (1e3 * self.last(torch.tanh(self.first(x)))).mean()


@captures_of("overflow")
def _overflowed(pins: Mapping[str, Any]) -> tuple[list[bool], list[float], list[float]]:
    torch.manual_seed(7)
    model = Loud()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, _ = small_batch()
    graphaccel.optimize(model, optimizer, devices=2, precision="fp16", example_batch=x, **pins)
    own = {n: p for n, p in model.named_parameters() if not isinstance(p, RemoteTensor)}
    moved, factors, norms = [], [], []
    for _ in range(12):
        before = {n: p.detach().clone() for n, p in own.items()}
        model(x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(p, before[n]) for n, p in own.items()))
        factors.append(model.graphaccel.loss_scale)
    return moved, factors, norms


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_an_overflow_skips_the_step_on_every_rank(pool: Pool, pins: dict[str, Any]) -> None:
    (moved, factors, norms), second = pool.run(2, _overflowed, pins)
    assert second[:2] == (moved, factors)
    assert second[2] == pytest.approx(norms, rel=0, abs=0, nan_ok=True)
    skipped = moved.index(True)
    assert 0 < skipped < 12
    assert all(moved[skipped:])
    assert factors[:skipped] == [65536.0 / 2 ** (i + 1) for i in range(skipped)]
    assert set(factors[skipped:]) == {factors[skipped - 1]}
    assert all(map(math.isnan, norms[:skipped]))  # torch's own is not finite either
    assert min(norms[skipped:]) > 0


# --- random numbers -------------------------------------------------------------------------------


class Dropping(Classifier):
    """Dropout between the two layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))


class DroppingBlocks(Classifier):
    """Four identical blocks with dropout, which can be recomputed."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)) for _ in range(4)]
        super().__init__(nn.Sequential(*blocks))


class Kept(nn.Module):
    """Its loss counts the elements that dropout kept: `forward(x)`, x [B, 8] of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.dropout(x * self.scale)
        return kept.mean(), kept


def _masks() -> Tensor:
    torch.manual_seed(11)
    model = graphaccel.optimize(Kept(), devices=2, data=2, outputs="all")
    return model(torch.ones(8, 64))[1].detach()


def test_data_ranks_draw_different_masks(pool: Pool) -> None:
    first, second = pool.run(2, _masks)
    assert torch.equal(first, second)
    halves = first.chunk(2)
    assert not torch.equal(*halves)
    assert 0.35 < (first > 0).double().mean() < 0.65


@captures_of("recomputed draws")
def _with_recomputation(pins: Mapping[str, Any]) -> list[list[float]]:
    curves = []
    for recompute in ("none", "all"):
        torch.manual_seed(5)
        model = DroppingBlocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphaccel.optimize(model, optimizer, devices=2, recompute=recompute, **pins)
        torch.manual_seed(6)
        curves.append([])
        for _ in range(4):
            loss = model(*small_batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(loss.item())
        assert bool(model.graphaccel.plan.recompute) is (recompute == "all")
    return curves


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_recomputed_dropout_draws_the_same_masks(pool: Pool, pins: dict[str, Any]) -> None:
    for none, every in pool.run(2, _with_recomputation, pins):
        assert none == pytest.approx(every, rel=1e-6)
        assert len(set(none)) == 4


def test_one_process_draws_as_eager_does() -> None:
    batch = small_batch()
    torch.manual_seed(5)
    plain = Dropping()
    planned = graphaccel.optimize(copy.deepcopy(plain), example_batch=batch, microbatches=1)
    losses = []
    for model in (plain, planned):
        torch.manual_seed(9)
        loss = model(*batch)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for (name, true), (_, got) in zip(
        plain.named_parameters(), planned.named_parameters(), strict=True
    ):
        assert torch.equal(true.grad, got.grad), name
