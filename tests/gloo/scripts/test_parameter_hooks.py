"""What scripts attach to parameters, or assign to their `.data` and `.grad`, where a rank holds a
shard or nothing of some: equal to plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, plans_of_two, weights

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("zero3", "pipeline")


class Net(nn.Module):
    """Inputs [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))), y)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(4, 4, generator=generator).double() for _ in range(2))


def gradient_hooks(wrap: Wrap) -> Iterator[Tensor]:
    """Hooks on gradients, one of them taken off again; clipping of one layer alone."""
    model = Net().double()
    handle = model.b.weight.register_hook(lambda g: g * 3)
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    for step in range(4):
        if step == 2:
            handle.remove()
        optimizer.zero_grad()
        loss = model(*_batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.c.parameters(), 0.01)
        optimizer.step()
        yield loss
    yield from weights(model)


def gradients_made_before(wrap: Wrap) -> Iterator[Tensor]:
    """Gradients that the script makes itself and holds in a list, which it scales and clears; those
    of a backward from before `optimize` are among them."""
    model = Net().double()
    model(*_batch(9)).backward()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model.c.bias.grad = torch.ones_like(model.c.bias)
    held = [p.grad for p in model.parameters()]
    for step in range(3):
        loss = model(*_batch(step))
        loss.backward()
        torch._foreach_mul_(held, 0.5)
        yield torch.nn.utils.get_total_norm(held)
        optimizer.step()
        torch._foreach_zero_(held)
        yield loss
    yield from weights(model)


def optimizer_in_backward(wrap: Wrap) -> Iterator[Tensor]:
    """Each parameter is stepped by a hook as soon as its gradient is there."""
    model = Net().double()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    model = wrap(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for step in range(3):
        loss = model(*_batch(step))
        loss.backward()
        yield loss
    yield from weights(model)


def data_assigned(wrap: Wrap) -> Iterator[Tensor]:
    """`parameter.data = ...`, of its own values and of full tensors."""
    model = Net().double()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*_batch(step))
        loss.backward()
        optimizer.step()
        yield loss
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
            if step == 1:
                parameter.data = (
                    torch.linspace(-1, 1, parameter.numel()).double().view_as(parameter)
                )
    yield from weights(model)


SCRIPTS = {
    f.__name__: f
    for f in (gradient_hooks, gradients_made_before, optimizer_in_backward, data_assigned)
}


@captures_of("parameter hooks")
def _all_equal(plan: str) -> dict[str, float]:
    return {name: furthest(script, PLANS[plan]) for name, script in SCRIPTS.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_as_plain(pool: Pool, plan: str) -> None:
    for found in pool.run(2, _all_equal, plan):
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}


@captures_of("parameter hooks")
def _refused(plan: str) -> list[str]:
    """What is said of data of another shape, and of one vector of all parameters."""
    model = graphaccel.optimize(Net().double(), example_batch=_batch(0), **PLANS[plan])
    said = []
    for attempt in (
        lambda: [setattr(p, "data", p.data.new_zeros(5)) for p in model.parameters()],
        lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
    ):
        try:
            attempt()
        except graphaccel.errors.GraphAccelError as error:
            said.append(str(error).splitlines()[0])
    return said


def test_another_shape_is_refused(pool: Pool) -> None:
    for said in pool.run(2, _refused, "zero3"):
        assert said == [
            "error[GA407]: `.data` of a parameter of shape [4, 4] in torch.float64 was set to a "
            "tensor of shape [5] in torch.float64, and this rank held only a part of it or none"
        ]


def test_one_vector_of_all_stages_is_refused(pool: Pool) -> None:
    for said in pool.run(2, _refused, "pipeline"):
        assert said[-1] == (
            "error[GA408]: `cat` needs the values of a parameter that is on another pipeline rank"
        )


def _parts_of_one_tensor(plan: str) -> str:
    model = graphaccel.optimize(Net().double(), **PLANS[plan])
    flat = torch.zeros(sum(p.numel() for p in model.parameters())).double()
    for parameter, part in zip(
        model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    try:
        model(*_batch(0))
    except graphaccel.errors.GraphMisuse as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_are_parts_of_one_tensor_are_refused(pool: Pool, plan: str) -> None:
    for said in pool.run(2, _parts_of_one_tensor, plan):
        assert said.splitlines()[:2] == [
            "error[GA407]: the gradient of `a.weight` is a view of a larger tensor, and the plan "
            "moves it",
            "  help: let the first step make it:  optimizer.zero_grad(set_to_none=True)",
        ]
