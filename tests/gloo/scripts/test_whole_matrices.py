"""Optimizers that read whole matrices: as on one device, also where parameters are sharded."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: list[dict[str, Any]] = [
    {"data": 2, "zero": 0},
    {"pipeline": 2},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"tensor": 2},
]


class Matrices(nn.Module):
    """`forward(x, y)`: [B, 6], [B] → mean cross entropy; every parameter is a matrix."""

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)
        self.more = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.more(torch.tanh(self.first(x)))), y)


class TwoSided(torch.optim.Optimizer):
    """Shampoo in two lines: preconditions a matrix from both sides; its state is [m, m], [n, n]."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    for key, size in zip(("left", "right"), p.shape, strict=True):
                        state[key] = torch.eye(size, dtype=p.dtype)
                state["left"] += p.grad @ p.grad.T
                state["right"] += p.grad.T @ p.grad
                update = torch.linalg.solve(state["left"], p.grad)
                p -= group["lr"] * torch.linalg.solve(state["right"], update, left=False)


class ByNorm(TwoSided):
    """Divides by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = sum(p.grad.square().sum() for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / norm


class Packed(Tensor):
    """A tensor with a storage of its own, as quantized state is."""


class PackedState(TwoSided):
    """Keeps a tensor subclass in the shape of the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["sums"] = p.grad.clone().as_subclass(Packed)
                    p -= group["lr"] * p.grad


class Flagged(TwoSided):
    """Says of each parameter, when it is built, how it is stepped, and reads that of all."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["by_norm"] = p.dim() == 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for p in [p for p in group["params"] if self.state[p]["by_norm"]]:
            if p.grad is not None:
                p -= group["lr"] * p.grad / p.grad.norm()


class Bare(TwoSided):
    """Takes for granted that every parameter has a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p -= self.param_groups[0]["lr"] * p.grad / p.grad.norm()


class Noisy(TwoSided):
    """Adds noise, from its `first` step on."""

    first = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                noise = torch.randn_like(p) if self.steps >= self.first else 0.0
                p -= self.param_groups[0]["lr"] * (p.grad / p.grad.norm() + noise)


class NoisyLater(Noisy):
    """Its noise begins where no probe sees it."""

    first = 5


KINDS = TwoSided, Flagged, ByNorm, PackedState, Bare, Noisy, NoisyLater
OWN = {kind.__name__: kind for kind in KINDS}


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind = OWN.get(name) or getattr(torch.optim, name)
    return kind(model.parameters(), lr=0.05)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator).double(), torch.tensor([0, 1, 2, 3])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(*_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _pair(name: str, pins: dict[str, Any], layers: int = 0) -> list[Any]:
    """The plain model and optimizer, and ours under a plan. layers: more of them."""
    torch.manual_seed(0)
    plain = Matrices(layers).double()
    ours = copy.deepcopy(plain)
    optimizers = [_optimizer(name, m) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=2, example_batch=_batch(), **pins)
    return [plain, optimizers[0], ours, optimizers[1]]


def _furthest(plain: nn.Module, ours: nn.Module) -> float:
    state = graphaccel.full_state_dict(ours)
    return max((state[n] - v).abs().max().item() for n, v in plain.state_dict().items())


def _train_by_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(*_batch())
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]


@captures_of("whole matrices")
def _stepped_by_closure(name: str) -> list[float]:
    furthest = []
    for pins in PLANS[-2:]:
        plain, optimizer, ours, own = _pair(name, pins)
        _train_by_closure(plain, optimizer)
        _train_by_closure(ours, own)
        furthest.append(_furthest(plain, ours))
    return furthest


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_a_closure_computes_the_gradients_that_are_gathered(pool: Pool, name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    for furthest in pool.run(2, _stepped_by_closure, name):
        assert max(furthest) < 1e-12


@captures_of("whole matrices")
def _stepped(name: str) -> list[float]:
    furthest = []
    for pins in PLANS:
        plain, optimizer, ours, own = _pair(name, pins)
        _train(plain, optimizer, 3)
        _train(ours, own, 3)
        furthest.append(_furthest(plain, ours))
    return furthest


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "TwoSided", "Flagged", "Bare"])
def test_as_on_one_device(pool: Pool, name: str) -> None:
    if name not in OWN and not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    for furthest in pool.run(2, _stepped, name):
        assert max(furthest) < 1e-12, furthest


@captures_of("whole matrices")
def _resumed(name: str, folder: str) -> float:
    """Trained and saved under ZeRO 3, resumed under tensor, then under ZeRO 1."""
    plain, optimizer, ours, own = _pair(name, {"data": 2, "zero": 3})
    _train(plain, optimizer, 6)
    _train(ours, own, 2)
    graphaccel.save(folder, ours, own, step=2)
    for step, pins in ((4, {"tensor": 2}), (6, {"data": 2, "zero": 1})):
        _, _, ours, own = _pair(name, pins)
        graphaccel.load(folder, ours, own)
        _train(ours, own, 2)
        graphaccel.save(folder, ours, own, step=step)
    return _furthest(plain, ours)


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Flagged"])
def test_a_checkpoint_moves_between_plans(pool: Pool, name: str, tmp_path: Path) -> None:
    if name not in OWN and not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    assert max(pool.run(2, _resumed, name, str(tmp_path))) < 1e-12


@captures_of("whole matrices")
def _refused(name: str, pins: dict[str, Any]) -> str:
    with pytest.raises(errors.NotElementwise) as caught:
        _pair(name, pins)
    return caught.value.reason


@pytest.mark.parametrize("pins", [{"pipeline": 2}, {"data": 2, "zero": 3}], ids=str)
def test_one_that_couples_parameters_is_refused(pool: Pool, pins: dict[str, Any]) -> None:
    reason = "its step of one parameter depends on the gradients of others"
    assert pool.run(2, _refused, "ByNorm", pins) == [reason] * 2


@captures_of("whole matrices")
def _noisy(pins: dict[str, Any]) -> None:
    with pytest.raises(errors.NotElementwise, match="draws random numbers"):
        _pair("Noisy", pins)
    _, _, ours, own = _pair("NoisyLater", pins)
    _train(ours, own, NoisyLater.first - 1)
    with pytest.raises(errors.NotElementwise, match="draws random numbers"):
        _train(ours, own, 1)


@pytest.mark.parametrize("pins", [{"pipeline": 2}, {"data": 2, "zero": 3}], ids=str)
def test_one_that_draws_is_refused(pool: Pool, pins: dict[str, Any]) -> None:
    pool.run(2, _noisy, pins)


@captures_of("whole matrices")
def _kept_whole(name: str) -> tuple[int, int, int, float]:
    train = _train_by_closure if name == "LBFGS" else partial(_train, steps=3)
    plain, optimizer, ours, own = _pair(name, {}, layers=6)  # Adam would get a pipeline
    torch.manual_seed(1)
    train(plain, optimizer)
    torch.manual_seed(1)
    train(ours, own)
    plan = ours.graphaccel.plan
    return plan.pipeline, plan.tensor, plan.zero, _furthest(plain, ours)


@pytest.mark.parametrize("name", ["ByNorm", "LBFGS", "Noisy"])
def test_the_plan_that_is_chosen_keeps_what_is_coupled_whole(pool: Pool, name: str) -> None:
    for *split, furthest in pool.run(2, _kept_whole, name):
        assert split == [1, 1, 0]
        assert furthest < 1e-9


def _like_a_shard() -> str:
    """A weight [8, 4] in shards [4, 4], and whole state [4, 4]."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False)).double()
    optimizer = TwoSided(model.parameters(), lr=0.05)
    x = torch.randn(4, 4, dtype=torch.float64)
    graphaccel.optimize(
        model, optimizer, devices=2, data=2, zero=3, loss_fn=lambda out: out.square().mean(),
        example_batch=(x,),
    )  # fmt: skip
    model(x).backward()
    with pytest.raises(errors.NotElementwise) as caught:
        optimizer.step()
    return caught.value.reason


def test_state_that_looks_like_a_shard_is_refused_by_name(pool: Pool) -> None:
    for reason in pool.run(2, _like_a_shard):
        assert reason.startswith("its state 'right' of shape [4, 4] is whole, and has the shape of")


@captures_of("whole matrices")
def _packed_state() -> str:
    _, _, ours, own = _pair("PackedState", {"data": 2, "zero": 3})
    ours(*_batch()).backward()
    with pytest.raises(errors.NotElementwise) as caught:
        own.step()
    return caught.value.reason


def test_state_of_a_tensor_subclass_is_refused_by_name(pool: Pool) -> None:
    reason = "its state 'sums' is of class Packed, which is not known to be cut like its parameter"
    assert pool.run(2, _packed_state) == [reason] * 2
