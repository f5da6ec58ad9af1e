"""A script's own habits under two ranks: clipping, schedulers, accumulation, checkpoints, modes.

Every job runs the same training on one process in eager mode and under the plan, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphaccel
from graphaccel.runtime.parameters.remote import RemoteTensor
from tests.support.captures import captures_of
from tests.support.gpt import GPT
from tests.support.pool import Pool
from tests.support.small import WithLogits, small_batch
from tests.support.zoo import ZOO

pytestmark = pytest.mark.multiprocess

PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"pipeline": 2, "microbatches": 4},
)
IDS = ("data", "pipeline")
PIPELINE = PLANS[1]


def gpt(layers: int = 2) -> GPT:
    """A tied GPT in float64 with weights large enough for gradients to differ."""
    torch.manual_seed(7)
    return GPT(layers=layers, deviation=0.15).double()


def tokens(rows: int = 8, length: int = 16, seed: int = 3) -> dict[str, Tensor]:
    """A batch for GPT; row i ignores its first i labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    return {"input_ids": ids, "labels": labels}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def pair(
    build: Callable[[], nn.Module], pins: Mapping[str, Any], lr: float = 1e-3, devices: int = 2
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """(eager model, its AdamW, the same under a plan, its AdamW)."""
    plain = build()
    planned = copy.deepcopy(plain)
    plain_optimizer = torch.optim.AdamW(groups(plain), lr=lr)
    planned_optimizer = torch.optim.AdamW(groups(planned), lr=lr)
    graphaccel.optimize(planned, planned_optimizer, devices=devices, **pins)
    return plain, plain_optimizer, planned, planned_optimizer


def furthest(true: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """Largest absolute difference of two dicts of tensors with the same names and dtypes."""
    assert set(true) == set(got)
    for name in true:
        assert got[name].shape == true[name].shape, name
        assert got[name].dtype == true[name].dtype, name
    return max((got[name] - true[name]).abs().max().item() for name in true)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of this rank, by name."""
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if not isinstance(p, RemoteTensor) and p.grad is not None
    }


def own_gradients(plain: nn.Module, planned: nn.Module) -> float:
    """Largest difference of the gradients this rank holds; it holds some."""
    got = gradients(planned)
    assert got
    true = gradients(plain)
    return furthest({name: true[name] for name in got}, got)


# --- optimizer steps ------------------------------------------------------------------------------


@captures_of("scripts")
def _clipped(pins: Mapping[str, Any]) -> tuple[float, float]:
    plain, _, planned, _ = pair(gpt, pins)
    norms = []
    for model in (plain, planned):
        model(**tokens()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
    assert norms[0] > 0.05
    return abs(norms[0] - norms[1]), own_gradients(plain, planned)


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_clipping_sees_the_norm_of_all_parameters(pool: Pool, pins: dict[str, Any]) -> None:
    for norm, grads in pool.run(2, _clipped, pins):
        assert norm <= 1e-10
        assert grads <= 1e-10


@captures_of("scripts")
def _scheduled(pins: Mapping[str, Any]) -> float:
    plain, first, planned, second = pair(gpt, pins)
    for model, optimizer in ((plain, first), (planned, second)):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
        for step in range(20):
            model(**tokens(seed=step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
    return furthest(plain.state_dict(), graphaccel.full_state_dict(planned))


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_schedulers_and_parameter_groups(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _scheduled, pins)) <= 1e-9


@captures_of("scripts")
def _accumulated(pins: Mapping[str, Any]) -> float:
    plain, _, planned, _ = pair(gpt, pins)
    for model in (plain, planned):
        for part in range(3):
            (model(**tokens(seed=part)) / 3).backward()
    return own_gradients(plain, planned)


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_gradients_accumulate_over_calls(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _accumulated, pins)) <= 1e-10


@captures_of("scripts")
def _penalised(pins: Mapping[str, Any]) -> float:
    plain, _, planned, _ = pair(gpt, pins)
    factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    seen = []
    for model in (plain, planned):
        loss = 0.5 * model(**tokens()) + 0.1 * factor**2
        loss.backward()
        seen.append(loss.item())
        assert factor.grad is not None
        assert factor.grad.item() == pytest.approx(0.4)
        factor.grad = None
    return max(abs(seen[0] - seen[1]), own_gradients(plain, planned))


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_terms_added_outside_of_the_model(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _penalised, pins)) <= 1e-10


# --- batches and modes ----------------------------------------------------------------------------


@captures_of("scripts")
def _resized(pins: Mapping[str, Any]) -> float:
    plain, first, planned, second = pair(gpt, pins)
    sizes = ((8, 16), (4, 16), (8, 10), (16, 7), (8, 16))
    losses: list[list[float]] = []
    for model, optimizer in ((plain, first), (planned, second)):
        losses.append([])
        for rows, length in sizes:
            loss = model(**tokens(rows, length))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_batches_of_other_sizes(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _resized, pins)) <= 1e-9


@captures_of("scripts")
def _gpt2(pins: Mapping[str, Any]) -> tuple[float, float, str, bool]:
    batch = ZOO["gpt2"].build()[1]
    plain, first, planned, second = pair(lambda: ZOO["gpt2"].build()[0].double(), pins)
    for model, optimizer in ((plain, first), (planned, second)):
        for rows, length in ((8, 16), (4, 16), (8, 10), (8, 16)):
            model(**{key: value[:rows, :length] for key, value in batch.items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    plain.eval()
    planned.eval()
    logits = 0.0
    for rows, length in ((8, 16), (3, 10)):  # captured alone, then with sizes
        part = {key: value[:rows, :length] for key, value in batch.items()}
        with torch.no_grad():
            true, got = plain(**part), planned(**part)
        logits = max(logits, (true.logits - got.logits).abs().max().item())
    states = furthest(plain.state_dict(), graphaccel.full_state_dict(planned))
    return states, logits, type(got).__name__, torch.equal(true.loss, got.loss)


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_a_transformers_model_over_other_sizes(pool: Pool, pins: dict[str, Any]) -> None:
    for states, logits, kind, same_loss in pool.run(2, _gpt2, pins):
        assert states <= 1e-9
        assert logits <= 1e-9
        assert kind == "CausalLMOutputWithCrossAttentions"
        assert same_loss


class _Flagged(nn.Module):
    """A GPT whose call takes more than tensors, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(
        self, ids: Tensor, mask: Tensor | None, labels: Tensor, *, halve: bool, scale: float = 1.0
    ) -> Tensor:
        loss = self.inner(ids, labels) * scale
        loss = loss if mask is None else loss * mask.mean()
        return loss / 2 if halve else loss


@captures_of("scripts")
def _flags(pins: Mapping[str, Any]) -> float:
    plain, _, planned, _ = pair(_Flagged, pins)
    batch, worst = tokens(), 0.0
    for flags in ({"halve": True}, {"halve": False, "scale": 3}, {"halve": True}):
        for model in (plain, planned):
            model.zero_grad()
            model(batch["input_ids"], None, batch["labels"], **flags).backward()
        worst = max(worst, own_gradients(plain, planned))
    return worst


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_a_call_takes_flags_and_none(pool: Pool, pins: dict[str, Any]) -> None:
    """Each value is written into a graph of its own."""
    assert max(pool.run(2, _flags, pins)) <= 1e-10


@captures_of("scripts")
def _evaluated() -> float:
    plain, first, planned, second = pair(lambda: WithLogits().double(), PIPELINE)
    x, y = small_batch()
    batch = (x.double(), y)
    worst = 0.0
    for training in (False, True):
        for model, optimizer in ((plain, first), (planned, second)):
            model.train()
            model(*batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            model.train(training)
        with torch.no_grad():
            true, got = plain(*batch), planned(*batch)
        worst = max(worst, furthest(true, got))
        assert planned.training is training
    return worst


def test_evaluation_under_a_pipeline(pool: Pool) -> None:
    assert max(pool.run(2, _evaluated)) <= 1e-12


@captures_of("scripts")
def _without_labels() -> tuple[float, bool]:
    plain, _, planned, _ = pair(gpt, PIPELINE)
    planned(**tokens()).backward()
    planned.eval()
    ids = tokens(5, 9)["input_ids"]
    with torch.inference_mode():
        logits = planned(ids)
    return (logits - plain(ids)).abs().max().item(), planned.training


def test_inference_without_labels_under_a_pipeline(pool: Pool) -> None:
    for error, training in pool.run(2, _without_labels):
        assert error <= 1e-12
        assert not training


# --- state ----------------------------------------------------------------------------------------


@captures_of("scripts")
def _checkpoint() -> tuple[float, float, set[bool]]:
    plain, first, planned, second = pair(gpt, PIPELINE)
    for model, optimizer in ((plain, first), (planned, second)):
        for step in range(3):
            model(**tokens(seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    local, true = planned.state_dict(), plain.state_dict()
    assert list(local) == list(true)
    assert all(local[name].shape == true[name].shape for name in true)
    full = graphaccel.full_state_dict(planned)
    fresh = gpt()
    fresh.load_state_dict(full)
    first_error = furthest(true, fresh.state_dict())
    planned.load_state_dict(gpt().state_dict())  # weights of another time, in full, on every rank
    again = furthest(gpt().state_dict(), graphaccel.full_state_dict(planned))
    shards = {isinstance(value, DTensor) for value in local.values()}
    return first_error, again, shards


def test_state_dicts(pool: Pool) -> None:
    for error, again, shards in pool.run(2, _checkpoint):
        assert error <= 1e-9
        assert again == 0.0
        assert shards == {True, False}


@captures_of("scripts")
def _frozen(pins: Mapping[str, Any]) -> float:
    def build() -> nn.Module:
        model = gpt()
        model.position.weight.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        return model

    plain, first, planned, second = pair(build, pins)
    for model, optimizer in ((plain, first), (planned, second)):
        for step in range(3):
            model(**tokens(seed=step)).backward()
            assert model.unused.grad is None
            assert model.position.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
    return furthest(plain.state_dict(), graphaccel.full_state_dict(planned))


@pytest.mark.parametrize("pins", PLANS, ids=IDS)
def test_frozen_and_unreached_parameters(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _frozen, pins)) <= 1e-9


class Borrowing(nn.Module):
    """The last stage reads the first one's weight without a gradient; `forward(x, y)` → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(x @ self.layers[0].weight.detach(), y)


@captures_of("scripts")
def _borrowed() -> float:
    plain, first, planned, second = pair(lambda: Borrowing().double(), PIPELINE)
    x, y = small_batch()
    for model, optimizer in ((plain, first), (planned, second)):
        for _ in range(3):
            model(x.double(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return furthest(plain.state_dict(), graphaccel.full_state_dict(planned))


def test_a_weight_that_another_stage_reads_without_a_gradient(pool: Pool) -> None:
    assert max(pool.run(2, _borrowed)) <= 1e-9
