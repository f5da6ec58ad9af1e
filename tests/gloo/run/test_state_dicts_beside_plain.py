"""State dicts of a plan beside plain tensors: targets, averages and optimizers of the whole model
take them, or an error says what to do; one process's part is never saved as if it were all."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphaccel
from graphaccel.errors import ElsewhereNeeded, PartOfModel
from graphaccel.runtime.parameters.remote import RemoteTensor
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("zero1", "zero3", "tensor", "pipeline")
State = dict[str, Tensor]


class Net(nn.Module):
    """Inputs [B, 6], targets [B, 5]; sizes that two ranks divide, and some that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.norm(self.up(x)).relu()), y)


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(8, 6, generator=generator).double(),
        torch.randn(8, 5, generator=generator).double(),
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(*_batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _target(model: nn.Module, other: Net, mean: State) -> None:
    other.load_state_dict(model.state_dict())


def _average(model: nn.Module, other: Net, mean: State) -> None:
    for name, value in model.state_dict().items():
        mean[name].mul_(0.9).add_(value, alpha=0.1)
    other.load_state_dict(mean)


def _lists(model: nn.Module, other: Net, mean: State) -> None:
    torch._foreach_lerp_(list(mean.values()), list(model.state_dict().values()), 0.1)
    other.load_state_dict(mean)


def _soft(model: nn.Module, other: Net, mean: State) -> None:
    new, old = model.state_dict(), other.state_dict()
    given = {name: {"input": 0.1 * new[name], "other": 0.9 * old[name]} for name in new}
    other.load_state_dict({name: torch.add(**named) for name, named in given.items()})


def _pulled(model: nn.Module, other: Net, mean: State) -> None:
    for name, value in model.state_dict().items():
        value.copy_(0.9 * value + 0.1 * mean[name])  # a state dict is the model's memory
    other.load_state_dict(graphaccel.full_state_dict(model))


def _snapshot(model: nn.Module, other: Net, mean: State) -> None:
    kept = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(kept)
    other.load_state_dict(graphaccel.full_state_dict(model))


def _read(model: nn.Module, other: Net, mean: State) -> None:
    arrays = {name: torch.from_numpy(v.numpy().copy()) for name, v in model.state_dict().items()}
    other.load_state_dict({name: v + v.sum() for name, v in arrays.items()})


USES: dict[str, Callable[[nn.Module, Net, State], None]] = {
    "target": _target,
    "average": _average,
    "lists": _lists,
    "soft": _soft,
    "pulled": _pulled,
    "snapshot": _snapshot,
    "read": _read,
}
IN_STAGES = {"pulled", "snapshot"}  # of which each rank does its own stages; others need all values


def _after(model: nn.Module, use: str, optimizer: torch.optim.Optimizer) -> list[State]:
    other, mean = _net(), copy.deepcopy(_net().state_dict())
    states = []
    for step in range(3):
        _step(model, optimizer, step)
        USES[use](model, other, mean)
        states.append(copy.deepcopy(other.state_dict()))
    return states


@captures_of("beside plain")
def _differences(use: str, pins: dict[str, Any]) -> list[float]:
    plain, planned = _net(), _net()
    optimizer = torch.optim.AdamW(planned.parameters(), lr=0.01)
    graphaccel.optimize(planned, optimizer, devices=2, **pins)
    got = _after(planned, use, optimizer)
    wanted = _after(plain, use, torch.optim.AdamW(plain.parameters(), lr=0.01))
    start = _net().state_dict()
    assert all((wanted[0][name] != value).any() for name, value in start.items())
    pairs = zip(wanted, got, strict=True)
    return [(b[name] - a[name]).abs().max().item() for a, b in pairs for name in a]


CASES = [(u, p) for p in PLANS for u in USES if p != "pipeline" or u in IN_STAGES]


@pytest.mark.parametrize(("use", "plan"), CASES)
def test_state_dicts_work_beside_plain_tensors(pool: Pool, use: str, plan: str) -> None:
    for differences in pool.run(2, _differences, use, PLANS[plan]):
        assert max(differences) <= 1e-14


@captures_of("beside plain")
def _refused(use: str) -> str:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    graphaccel.optimize(model, optimizer, devices=2, **PLANS["pipeline"])
    with pytest.raises(ElsewhereNeeded) as caught:
        _after(model, use, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("use", sorted(set(USES) - IN_STAGES - {"read"}))
def test_what_other_stages_have_is_refused_with_the_line(pool: Pool, use: str) -> None:
    for text in pool.run(2, _refused, use):
        first, where, *_ = text.splitlines()
        assert first.endswith("needs the values of a parameter that is on another pipeline rank")
        assert "test_state_dicts_beside_plain.py" in where
        assert "state = graphaccel.full_state_dict(model)" in text


@captures_of("beside plain")
def _of_optimizer(pins: dict[str, Any]) -> tuple[str, str, float]:
    """What pickling its state says, what an optimizer of the plain model says or how far apart it
    is then, and what is kept of a plain optimizer's state."""
    model, plain = _net(), _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = torch.optim.AdamW(plain.parameters(), lr=0.01)
    graphaccel.optimize(model, optimizer, devices=2, **pins)
    for step in range(2):
        _step(model, optimizer, step)
        _step(plain, first, step)
    said = ""
    for state in (optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())):
        with pytest.raises(PartOfModel) as caught:
            torch.save({"optimizer": state}, io.BytesIO())
        said = str(caught.value)
    whole = graphaccel.full_state_dict(model)
    other = _net()
    other.load_state_dict(whole)
    second = torch.optim.AdamW(other.parameters(), lr=0.01)
    loaded = ""
    try:
        second.load_state_dict(optimizer.state_dict())
    except PartOfModel as error:
        loaded = str(error)
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    assert not any(isinstance(p, RemoteTensor) for p in optimizer.state)
    _step(plain, first, 2)
    _step(model, optimizer, 2)
    _step(other, second, 2)
    compared = [graphaccel.full_state_dict(model)] + ([] if loaded else [other.state_dict()])
    true = plain.state_dict()
    return said, loaded, max((s[n] - true[n]).abs().max().item() for s in compared for n in true)


@pytest.mark.parametrize("plan", PLANS)
def test_the_state_of_an_optimizer_is_never_a_part_unawares(pool: Pool, plan: str) -> None:
    for said, loaded, apart in pool.run(2, _of_optimizer, PLANS[plan]):
        assert said.startswith("error[GA411]: this optimizer's state dict can not be saved by one")
        assert bool(loaded) == (plan == "pipeline")
        assert "can not be loaded by one process" in loaded or not loaded
        assert apart <= 1e-14


@captures_of("beside plain")
def _whole_state() -> int:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    graphaccel.optimize(model, optimizer, devices=2, data=2, zero=0)
    _step(model, optimizer, 0)
    file = io.BytesIO()
    state = optimizer.state_dict()
    torch.save(state, file)
    assert not any(isinstance(v, DTensor) for s in state["state"].values() for v in s.values())
    return len(file.getvalue())


def test_a_state_that_every_process_has_is_saved(pool: Pool) -> None:
    assert min(pool.run(2, _whole_state)) > 0
