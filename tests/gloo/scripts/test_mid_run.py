"""What scripts do to a model, its gradients and its optimizer between steps: equal to plain PyTorch
in float64 under every kind of plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import Script, Wrap, furthest, plans_of_two, weights

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("zero3", "pipeline")


class Net(nn.Module):
    """Three layers and a loss; a buffer that is read, and a scalar one. Inputs [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x)))) + self.shift
        return F.mse_loss(self.c(h), y)


class Normed(nn.Module):
    """Inputs [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.c = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.c(torch.tanh(self.bn(self.a(x)))), y)


def _batch(step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(rows, 4, generator=generator).double() for _ in range(2))


def _between(step: int, model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    """Before the step."""
    if step == 1:
        torch.manual_seed(7)
        nn.init.xavier_uniform_(model.b.weight)
        model.c.reset_parameters()
        kept["best"] = copy.deepcopy(model.state_dict())
    elif step == 2:
        for parameter in model.parameters():
            state = optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                state["exp_avg"].mul_(0.5)
                state["exp_avg_sq"].add_(0.1)
    elif step == 3:
        model.load_state_dict(kept["best"])
    elif step == 4:
        with torch.no_grad():
            model.shift.add_(0.1)
            for parameter in model.parameters():
                parameter.clamp_(-0.4, 0.4)
    elif step == 5:
        model.a.requires_grad_(False)
    elif step == 6:
        model.a.requires_grad_(True)
        optimizer.state.clear()
    elif step == 7:
        optimizer.param_groups[0]["lr"] *= 0.1
        model.shift = model.shift * 2


def _after_backward(step: int, model: Any) -> None:
    """Changes of the gradients."""
    torch.manual_seed(step)
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if step == 1:
            parameter.grad.mul_(0.5).clamp_(-0.1, 0.1)
        elif step == 2:
            parameter.grad.add_(torch.randn(parameter.shape).double(), alpha=0.1)
        elif step == 3:
            parameter.grad = parameter.grad * 2 + 0.01 * parameter.detach()


def between_steps(wrap: Wrap) -> Iterator[Tensor]:
    """Weights, gradients, optimizer state and buffers that the script writes itself."""
    model = Net().double()
    model, optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.05))
    kept: dict[str, Any] = {}
    for step in range(9):
        if step:
            _between(step, model, optimizer, kept)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(*_batch(step, rows=8 if step == 5 else 4))
        yield loss
        if step == 4:  # no update from this batch
            continue
        (loss + 0.5 * model(*_batch(50 + step)) if step == 6 else loss).backward()
        _after_backward(step, model)
        optimizer.step()
    yield from weights(model)


def frozen_statistics(wrap: Wrap) -> Iterator[Tensor]:
    """Batch norm that stops learning its statistics after two steps."""
    model = Normed().double()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(4):
        model.train()
        if step >= 2:
            model.bn.eval()
        optimizer.zero_grad()
        loss = model(*_batch(step))
        loss.backward()
        optimizer.step()
        yield loss
    yield from weights(model)


class Wide(nn.Module):
    """Weights that are no squares, and a loss. Inputs [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x))), y)


def initialised_anew(wrap: Wrap) -> Iterator[Tensor]:
    """Weights that each of torch's functions draws between steps, and what is drawn after them."""
    init = nn.init
    ways = (
        init.orthogonal_, init.kaiming_normal_, init.eye_,
        lambda w: init.sparse_(w, 0.5),
    )  # fmt: skip
    model = Wide().double()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, way in enumerate((lambda _: None, *ways)):
        torch.manual_seed(step)
        for layer in (model.up, model.down):
            way(layer.weight)
        yield torch.rand(2)
        optimizer.zero_grad()
        loss = model(*_batch(step))
        loss.backward()
        optimizer.step()
        yield loss
    yield from weights(model)


def _furthest(script: Script, pins: dict[str, Any]) -> float:
    with captures_of("mid run"):
        return furthest(script, pins)


def test_one_process() -> None:
    assert _furthest(between_steps, {"devices": 1}) < 1e-12
    assert _furthest(frozen_statistics, {"devices": 1}) < 1e-12


@pytest.mark.parametrize("plan", PLANS)
def test_initialised_anew(pool: Pool, plan: str) -> None:
    assert max(pool.run(2, _furthest, initialised_anew, PLANS[plan])) < 1e-12


@pytest.mark.parametrize("plan", PLANS)
def test_between_steps(pool: Pool, plan: str) -> None:
    assert max(pool.run(2, _furthest, between_steps, PLANS[plan])) < 1e-12


def test_frozen_statistics(pool: Pool) -> None:
    assert max(pool.run(2, _furthest, frozen_statistics, {"data": 2})) < 1e-12


@captures_of("mid run")
def _scalars(folder: str) -> Tensor:
    """The scalar buffer that a checkpoint of stages brings back."""
    model = Net().double()
    model = graphaccel.optimize(model, example_batch=_batch(0), **PLANS["pipeline"])
    plain = Net().state_dict()
    model.load_state_dict({**graphaccel.full_state_dict(model), "count": torch.tensor(3.0)})
    state = model.state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in plain.items()}
    dcp.save(state, checkpoint_id=folder)
    model.load_state_dict({**graphaccel.full_state_dict(model), "count": torch.tensor(0.0)})
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return graphaccel.full_state_dict(model)["count"]


def test_scalars_of_other_stages(pool: Pool, tmp_path: Path) -> None:
    assert [float(count) for count in pool.run(2, _scalars, str(tmp_path))] == [3.0, 3.0]
