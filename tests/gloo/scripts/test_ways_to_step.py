"""What scripts do around a step, under every kind of plan: as on one device, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
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


class Layers(nn.Module):
    """`forward(x, y)`: [B, 6], [B] → mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(torch.tanh(self.first(x))))
        return F.cross_entropy(self.last(hidden), y)


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (8,), generator=generator)


class Script:
    """One way to step: `begin` before and `step` after `optimize`."""

    def begin(self, model: Any) -> torch.optim.Optimizer:
        """The optimizer that `optimize` is given."""
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return self.optimizer

    def step(self, model: Any, number: int) -> None:
        """One update."""
        model(*_batch(number)).backward()
        self.between(model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def between(self, model: Any) -> None:
        """Between backward and step."""


class ClipValue(Script):
    """Every number of a gradient is clipped."""

    def between(self, model: Any) -> None:
        """In place."""
        nn.utils.clip_grad_value_(model.parameters(), 0.01)


class Accumulate(Script):
    """Three batches a step, as `no_sync` is used for."""

    def step(self, model: Any, number: int) -> None:
        """Each counts a third."""
        for part in range(3):
            (model(*_batch(3 * number + part)) / 3).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Scaler(Script):
    """A GradScaler of the script, which clips what it has unscaled."""

    def begin(self, model: Any) -> torch.optim.Optimizer:
        """With a small scale."""
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return super().begin(model)

    def step(self, model: Any, number: int) -> None:
        """As torch's documentation has it."""
        self.scaler.scale(model(*_batch(number))).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Several(Script):
    """Two optimizers, of which `optimize` is given one."""

    def begin(self, model: Any) -> torch.optim.Optimizer:
        """Layers of one each."""
        others = [*model.inner.parameters(), *model.last.parameters()]
        self.other = torch.optim.SGD(others, lr=0.1)
        self.optimizer = torch.optim.Adam(model.first.parameters(), lr=0.01)
        return self.optimizer

    def step(self, model: Any, number: int) -> None:
        """Both."""
        super().step(model, number)
        self.other.step()
        self.other.zero_grad()


class AddGroup(Script):
    """A layer that is trained from the second step on."""

    def begin(self, model: Any) -> torch.optim.Optimizer:
        """Without the last layer."""
        first = [*model.first.parameters(), *model.inner.parameters()]
        self.optimizer = torch.optim.SGD(first, lr=0.1)
        return self.optimizer

    def step(self, model: Any, number: int) -> None:
        """With it."""
        if number == 1:
            self.optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.01})
        super().step(model, number)
        model.zero_grad()


class Average(Script):
    """An exponential average of the weights, which takes their place at the end."""

    def step(self, model: Any, number: int) -> None:
        """Made once there is a plan."""
        super().step(model, number)
        with torch.no_grad():
            if number == 0:
                self.kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                self.kept[name].lerp_(parameter, 0.3)
            if number == 2:
                for name, parameter in model.named_parameters():
                    parameter.copy_(self.kept[name])


class Closure(Script):
    """LBFGS, which calls the model."""

    def begin(self, model: Any) -> torch.optim.Optimizer:
        """Three calls a step."""
        self.optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        return self.optimizer

    def step(self, model: Any, number: int) -> None:
        """On one batch."""

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = model(*_batch(0))
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Closures(Script):
    """An optimizer of torch that calls its closure once; the first call makes the plan."""

    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def begin(self, model: Any) -> torch.optim.Optimizer:
        """State from the first step on."""
        self.optimizer = self.kind(model.parameters(), lr=0.05)
        return self.optimizer

    def step(self, model: Any, number: int) -> None:
        """Gradients are computed in the step, which returns the loss."""

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = model(*_batch(number))
            loss.backward()
            return loss

        assert isinstance(self.optimizer.step(closure), Tensor)


class Momentum(Closures):
    """The same with momentum."""

    kind = functools.partial(torch.optim.SGD, momentum=0.9)


class Penalised(torch.optim.Optimizer):
    """Steps another optimizer, by gradients that a closure computes anew and a norm before it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Tensor:
        """The norm is that of all gradients."""
        given = [p for group in self.param_groups for p in group["params"]]
        norms = [p.grad.norm() for p in given if p.grad is not None]
        norm = torch.stack(norms).norm() if norms else torch.zeros(())
        loss = closure()
        for parameter in given:
            if parameter.grad is not None:
                parameter.grad.div_(1 + norm.item())
        self.inner.step()
        return loss


class Wrapped(Closures):
    """An optimizer around another one, with a closure."""

    def begin(self, model: Any) -> torch.optim.Optimizer:
        """Of the outer one."""
        self.optimizer = Penalised(torch.optim.SGD(model.parameters(), lr=0.05))
        return self.optimizer


class Autocast(Script):
    """A forward in bfloat16, which no plan says."""

    def step(self, model: Any, number: int) -> None:
        """As torch's documentation has it."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*_batch(number))
        loss.backward()
        self.optimizer.step()


SCRIPTS: tuple[Callable[[], Script], ...] = (
    ClipValue, Accumulate, Scaler, Several, AddGroup, Average, Closure, Closures, Momentum,
    Wrapped, Autocast,
)  # fmt: skip


@captures_of("ways to step")
def _trained(pins: dict[str, Any]) -> dict[str, float | str]:
    """How far weights are from eager's after three steps, or the code of the error."""
    found: dict[str, float | str] = {}
    for made in SCRIPTS:
        torch.manual_seed(0)
        plain = Layers().double()
        ours = copy.deepcopy(plain)
        scripts = made(), made()
        optimizers = [s.begin(m) for s, m in zip(scripts, (plain, ours), strict=True)]
        name = type(scripts[0]).__name__
        try:
            graphaccel.optimize(ours, optimizers[1], devices=2, check="off", **pins)
            for number in range(3):
                scripts[1].step(ours, number)
        except errors.GraphAccelError as error:
            found[name] = error.code
            continue
        for number in range(3):
            scripts[0].step(plain, number)
        state = graphaccel.full_state_dict(ours)
        pairs = ((state[n], v) for n, v in plain.state_dict().items())
        found[name] = max((a - b).abs().max().item() for a, b in pairs)
    return found


PLANS = [
    ({"data": 2, "zero": 0}, {}),
    ({"data": 2, "zero": 1}, {"Closure": "GA211", "Wrapped": "GA211"}),
    ({"data": 2, "zero": 3}, {"Closure": "GA211", "Wrapped": "GA211"}),
    ({"pipeline": 2, "microbatches": 2}, {"Closure": "GA408", "Wrapped": "GA211"}),
    ({"tensor": 2}, {"Closure": "GA211", "Wrapped": "GA211"}),
]


@pytest.mark.parametrize(("pins", "refused"), PLANS, ids=[str(pins) for pins, _ in PLANS])
def test_as_on_one_device_or_refused(
    pool: Pool, pins: dict[str, Any], refused: dict[str, str]
) -> None:
    for found in pool.run(2, _trained, pins, timeout_s=300.0):
        codes = {name: value for name, value in found.items() if isinstance(value, str)}
        assert codes == {"Autocast": "GA106", **refused}
        wrong = {n: v for n, v in found.items() if not isinstance(v, str) and not v < 1e-12}
        assert not wrong
