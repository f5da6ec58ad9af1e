"""Functions that keep what they computed for the next call: no tensor without values is kept."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.untouched import refused

TABLE: dict[int, Tensor] = {}


@functools.cache
def unbounded(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.float64).triu(1) * -1e9


@functools.lru_cache(maxsize=4)
def bounded(n: int) -> dict[str, Any]:
    return {"mask": (torch.ones(n, n, dtype=torch.float64).triu(1) * -1e9, n)}


class Attends(nn.Module):
    """`forward(x)`: [B, T, 4] → loss, with a mask [T, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(4, 8), nn.Linear(4, 4)

    def mask(self, n: int) -> Tensor:
        return unbounded(n)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x).chunk(2, -1)
        weights = (q @ k.transpose(1, 2) + self.mask(x.shape[1])).softmax(-1)
        return F.mse_loss(self.o(weights @ x), x)


class Bounded(Attends):
    def mask(self, n: int) -> Tensor:
        return bounded(n)["mask"][0]


class Method(Attends):
    @functools.cache  # noqa: B019
    def mask(self, n: int) -> Tensor:
        return torch.ones(n, n, dtype=torch.float64).triu(1) * -1e9


class Lazy(Attends):
    """A buffer that the forward makes, and makes larger."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def mask(self, n: int) -> Tensor:
        if self.table is None or self.table.shape[0] < n:
            self.table = torch.ones(n, n, dtype=torch.float64).triu(1) * -1e9
        return self.table[:n, :n]


def _trained(kind: type[Attends], *, planned: bool) -> list[Tensor]:
    unbounded.cache_clear()
    bounded.cache_clear()
    torch.manual_seed(0)
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if planned:
        graphaccel.optimize(model, optimizer, devices=1)
    results = []
    for length in (3, 3, 5):
        optimizer.zero_grad()
        loss = model(torch.randn(2, length, 4).double())
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    with torch.no_grad():
        results.append(model.eval()(torch.randn(2, 5, 4).double()))
    return [*results, model.mask(5).clone(), *model.parameters()]


@pytest.mark.parametrize("kind", [Attends, Bounded, Method, Lazy])
def test_what_is_made_once(kind: type[Attends]) -> None:
    for a, b in zip(_trained(kind, planned=False), _trained(kind, planned=True), strict=True):
        assert (a - b).abs().max() <= 1e-12


class Averages(Attends):
    """A buffer that the first forward makes, and each further one changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def mask(self, n: int) -> Tensor:
        new = self.q.weight.mean().detach()
        self.mean = new if self.mean is None else 0.9 * self.mean + new
        return self.mean


class Grows(Attends):
    """A buffer that each forward makes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))

    def mask(self, n: int) -> Tensor:
        self.mean = torch.cat([self.mean, self.mean[-1:] + 1])
        return self.mean.sum()


@pytest.mark.parametrize("kind", [Averages, Grows])
def test_a_buffer_that_carries_state_and_is_made_anew(kind: type[Attends]) -> None:
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1)
    with pytest.raises(errors.StateFrozen, match="`mean` is a tensor that each forward leaves"):
        model(torch.randn(2, 5, 4).double())


def test_a_global_that_the_forward_fills() -> None:
    class Fills(Attends):
        def mask(self, n: int) -> Tensor:
            if n not in TABLE:
                TABLE[n] = torch.ones(n, n, dtype=torch.float64).triu(1) * -1e9
            return TABLE[n]

    number = inspect.getsourcelines(Fills.mask)[1] + 1
    text = f"""\
error[GA106]: `tests.capture.test_caches.TABLE` is outside of the model, and the forward leaves a tensor there
  --> test_caches.py:{number}
{number:>5} |             if n not in TABLE:
      |             ^^^^^^^^^^^^^^^^^^
  why:  tensors have no values while the model is captured
  help: hold it in the model:  self.TABLE = ...
  help: or in the cache of a function:  @functools.lru_cache(maxsize=None)
  explain: graphaccel explain GA106"""  # noqa: E501
    model = Fills().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(errors.StateFrozen, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=torch.randn(2, 5, 4).double())
    assert not TABLE
