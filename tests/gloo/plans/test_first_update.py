"""What an optimizer makes of shards in its first step is what it makes of whole parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import GraphAccelError
from graphaccel.proof import update_samples
from graphaccel.runtime.parameters.sharded_optimizer import ShardedOptimizer
from graphaccel.runtime.parameters.strides import Strides
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess
WORDS, WIDTH = 15, 8
Make = Callable[[nn.Module], torch.optim.Optimizer]

PLANS: dict[str, dict[str, Any]] = {
    "zero 1": {"data": 2, "zero": 1},
    "zero 3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
    "host": {"data": 2, "zero": 1, "offload": "optimizer"},
    "fused": {"data": 2, "zero": 2, "fusions": "auto"},
}


class Words(nn.Module):
    """An odd number of words, so that two ranks share the columns of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.embed(ids)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


class Trusting(torch.optim.Optimizer):
    """As LARS: the norm of a parameter beside that of its gradient says how far it goes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad * torch.norm(p) / torch.norm(p.grad) * self.param_groups[0]["lr"])


class Around(torch.optim.Optimizer):
    """As Lookahead: steps another one, then goes half of the way back in every second step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.count = inner, inner.param_groups, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        for p in self.param_groups[0]["params"]:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
            if self.count % 2 == 0:
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def _trusting(model: nn.Module) -> torch.optim.Optimizer:
    return Trusting(model.parameters(), lr=0.1)


def _declared(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = _trusting(model)
    optimizer.graphaccel_elementwise = True  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def _around(model: nn.Module) -> torch.optim.Optimizer:
    return Around(_adam(model))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(seed))
    model(ids).backward()
    torch.manual_seed(seed)
    optimizer.step()
    optimizer.zero_grad()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


@contextmanager
def as_views() -> Iterator[None]:
    """A part of each row is given to kernels that take memory as one range."""
    with patch.object(Strides, "read_by", lambda *_: True):
        yield


@contextmanager
def as_views_of_large_ones() -> Iterator[None]:
    """The same, where every parameter is too large to be gathered."""
    with as_views(), patch.object(update_samples, "_LARGEST", {True: 4, False: 4}):
        yield


@contextmanager
def not_gathered() -> Iterator[None]:
    """Full parameters keep the shards of other ranks as they were."""
    with patch.object(ShardedOptimizer, "_gather", lambda *_: None):
        yield


@captures_of("first update")
def _error(make: Make, pins: Mapping[str, Any], fault: Callable[[], Any]) -> str:
    model = _model()
    optimizer = make(model)
    with fault():
        try:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
            _step(model, optimizer, 0)
        except GraphAccelError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "plan", "fault", "parameter"),
    [
        (_fused, "zero 1", as_views, "embed.weight"),
        (_fused, "zero 1", as_views_of_large_ones, "embed.weight"),
        (_adam, "zero 1", not_gathered, "embed.weight"),
        (_declared, "zero 1", nullcontext, "embed.weight"),
        (_declared, "zero 3", nullcontext, "embed.weight"),
        (_declared, "tensor", nullcontext, "embed.weight"),
        (_declared, "host", nullcontext, "embed.weight"),
    ],
)
def test_all_ranks_stop(pool: Pool, make: Any, plan: str, fault: Any, parameter: str) -> None:
    one, other = pool.run(2, _error, make, PLANS[plan], fault)
    assert one == other
    assert one.startswith("error[GA110]: the first update of ")
    assert f"the new value of `{parameter}` is off by " in one
    assert "|     optimizer.step()" in one
    assert ("leave out:  Trusting.graphaccel_elementwise = True" in one) == (make is _declared)


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What a run leaves on this rank: weights, state, settings and the random state."""
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    weights = graphaccel.full_state_dict(model).values()
    return [*weights, *(v.detach().clone() for v in state), torch.get_rng_state()]


@captures_of("first update")
def _run(make: Make, pins: Mapping[str, Any], check: str) -> tuple[list[Tensor], list[str]]:
    model = _model()
    optimizer = make(model)
    with redirect_stderr(StringIO()) as said:
        graphaccel.optimize(model, optimizer, devices=2, check=check, **pins)
        _step(model, optimizer, 0)
        _step(model, optimizer, 1)
    lines = [line for line in said.getvalue().splitlines() if "update" in line]
    return _values(model, optimizer), lines


STEPPED = [(plan, make) for plan in PLANS for make in (_adam, _fused, _trusting)]
STEPPED.remove(("host", _trusting))  # GA211: it steps whole parameters


@pytest.mark.parametrize(("plan", "make"), STEPPED)
def test_one_line_and_nothing_changed(pool: Pool, plan: str, make: Make) -> None:
    checked = pool.run(2, _run, make, PLANS[plan], "first-step")
    plain = pool.run(2, _run, make, PLANS[plan], "off")
    kind = "Trusting" if make is _trusting else "AdamW"
    (line,) = checked[0][1]
    told = (
        rf"graphaccel: proved     {kind}'s update of [23] parameters equals one device's \(\S+\) +"
    )
    assert re.match(told, line)
    assert plain[0][1] == []
    for (values, _), (expected, _) in zip(checked, plain, strict=True):
        assert len(values) == len(expected)
        assert all(map(torch.equal, values, expected))


@captures_of("first update")
def _warmed(pins: Mapping[str, Any]) -> list[int]:
    """Lines about updates by step, of a schedule that begins with nothing."""
    model = _model()
    optimizer = _adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    counts = []
    graphaccel.optimize(model, optimizer, devices=2, **pins)
    for seed in range(3):
        with redirect_stderr(StringIO()) as said:
            _step(model, optimizer, seed)
            schedule.step()
        counts.append(said.getvalue().count("proved     AdamW's update of 2 parameters"))
    return counts


def test_a_step_that_changes_nothing_proves_nothing(pool: Pool) -> None:
    assert pool.run(2, _warmed, PLANS["zero 1"])[0] == [0, 1, 0]


@captures_of("first update")
def _hooked(pins: Mapping[str, Any]) -> str:
    """What is said where the script changes weights in a hook."""
    model = _model()
    optimizer = _adam(model)

    def halve(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    graphaccel.optimize(model, optimizer, devices=2, **pins)
    optimizer.register_step_post_hook(halve)
    with redirect_stderr(StringIO()) as said:
        _step(model, optimizer, 0)
    return said.getvalue()


def test_hooks_of_the_script_are_no_fault(pool: Pool) -> None:
    said = pool.run(2, _hooked, PLANS["zero 3"])[0]
    assert "not proved the optimizer's update: the hook `_hooked.<locals>.halve` may change" in said


@captures_of("first update")
def _wrapped(pins: Mapping[str, Any]) -> float:
    """How far three steps are off where the inner optimizer is the one that is optimized."""
    plain, model = _model(), _model()
    theirs, ours = _around(plain), _around(model)
    graphaccel.optimize(model, ours.inner, devices=2, **pins)  # pyright: ignore
    for seed in range(3):
        _step(plain, theirs, seed)
        _step(model, ours, seed)
    weights = graphaccel.full_state_dict(model)
    return max((weights[n] - w).abs().max().item() for n, w in plain.state_dict().items())


@pytest.mark.parametrize("plan", ["zero 1", "zero 3", "tensor", "host"])
def test_an_optimizer_around_another_is_refused(pool: Pool, plan: str) -> None:
    for text in pool.run(2, _error, _around, PLANS[plan], nullcontext):
        assert text.startswith("error[GA211]: Around does not work on parameters that are spread")
        assert "graphaccel.optimize(model, optimizer.inner)" in text
    assert max(pool.run(2, _wrapped, PLANS[plan])) < 1e-12


@captures_of("first update")
def _by_closure(pins: Mapping[str, Any]) -> float:
    """How far a step is off whose closure is the first call of the model."""
    plain, model = _model(), _model()
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    graphaccel.optimize(model, ours, devices=2, **pins)
    for each, optimizer in ((plain, theirs), (model, ours)):
        ids = torch.arange(24).view(4, 6) % WORDS

        def closure(each: nn.Module = each, ids: Tensor = ids) -> float:
            loss = each(ids)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
    weights = graphaccel.full_state_dict(model)
    return max((weights[n] - w).abs().max().item() for n, w in plain.state_dict().items())


def test_a_fused_step_may_begin_with_its_closure(pool: Pool) -> None:
    assert max(pool.run(2, _by_closure, PLANS["fused"])) < 1e-12
