"""What a forward keeps besides its outputs, and what surrounds it: equal to plain PyTorch, or what
is not there says so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import graphaccel
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    """`forward(x [4, 3])` → loss; `use(self, h)` does something with a hidden value [4, 2]."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use, self.cache, self.seen = nn.Linear(3, 2), use, {}, None
        self.square, self.options = nn.Linear(2, 2), {"rate": 0.5}
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.layer(x)).square().mean()


def replaced(s: Any, h: Tensor) -> Tensor:
    """Buffers that are replaced, and read before and after."""
    centred = h - s.mean
    s.mean = 0.9 * s.mean + 0.1 * h.detach().mean(0)
    s.count = s.count + 1
    return centred + s.mean / s.count


def cached(s: Any, h: Tensor) -> Tensor:
    """A table that the first forward makes, and values for the script that nobody reads."""
    s.options["last"] = h.std().item()
    if "table" not in s.cache:
        s.cache["table"] = torch.tensor([1.0, 3.0], dtype=h.dtype)
    s.seen = h.detach()
    return h * s.cache["table"]


def parametrized(s: Any, h: Tensor) -> Tensor:
    return s.square(s.square(h).tanh())


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def _train(model: nn.Module, pins: dict[str, Any] | None) -> Iterator[Tensor]:
    model = model.double()
    if model.use is parametrized:
        parametrize.register_parametrization(model.square, "weight", Symmetric())
    if pins is not None:
        model = graphaccel.optimize(model, **pins)
    steps: dict[Tensor, torch.optim.Optimizer] = {}

    def step(parameter: Tensor) -> None:
        steps[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        steps[parameter] = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(step)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(4, 3, generator=generator).double()
        with parametrize.cached():
            loss = model(x)
        loss.backward()
        yield loss
    model.eval()
    with torch.no_grad():
        yield model(x)
    yield from graphaccel.full_state_dict(model).values()


def _furthest(use: Callable[..., Tensor], pins: dict[str, Any]) -> float:
    results = []
    for chosen in (None, pins):
        torch.manual_seed(0)
        results.append([v.detach().double().clone() for v in _train(Net(use), chosen)])
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


USES = {f.__name__: f for f in (replaced, cached, parametrized)}


@pytest.mark.parametrize("name", USES)
def test_one_process(name: str) -> None:
    assert _furthest(USES[name], {"devices": 1}) < 1e-12


@pytest.mark.parametrize("name", USES)
def test_two_processes(pool: Pool, name: str) -> None:
    assert max(pool.run(2, _furthest, USES[name], {"data": 2})) < 1e-12


def test_a_value_that_nobody_reads_is_in_no_way() -> None:
    model = graphaccel.optimize(Net(cached), devices=1)
    model(torch.ones(4, 3)).backward()
    assert "not kept" in repr(model.seen)
    assert "not kept" in repr(model.options["last"])
    copied = copy.deepcopy(model)
    assert repr(copied.seen) == repr(pickle.loads(pickle.dumps(model.seen)))
    model(torch.ones(4, 3)).backward()  # the same step, not a new capture
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, 3))
    assert torch.equal(model.seen, model.layer(torch.ones(4, 3)))


def test_hooks_of_parameters_do_not_see_the_proof() -> None:
    model, seen = Net(lambda _, h: h), []
    model.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model = graphaccel.optimize(model, devices=1)
    loss = model(torch.ones(4, 3))
    assert not seen
    loss.backward()
    assert len(seen) == 1
