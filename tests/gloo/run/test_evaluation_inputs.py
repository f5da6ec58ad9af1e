"""Evaluation between training steps with other inputs than they have: under every kind of plan the
outputs are those of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import graphaccel
from graphaccel import errors
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess


class Masked(nn.Module):
    """The mask is of training batches alone, and so is a second head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.head, self.other = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        hidden = self.first(x).tanh()
        if mask is not None:
            hidden = hidden * mask
        hidden = self.second(hidden).tanh()
        scores, loss = self.head(hidden), None
        if labels is not None:
            loss = F.cross_entropy(scores, labels)
            if self.training:
                loss = loss + F.cross_entropy(self.other(hidden), labels)
        return loss, scores


def _trained(pins: dict[str, Any] | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Masked().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        x, mask = torch.randn(8, 4).double(), torch.rand(8, 8).double()
        labels = torch.randint(5, (8,))
        optimizer.zero_grad()
        loss, _ = model(x, mask, labels)
        loss.backward()
        optimizer.step()
        model.eval()
        with mode():
            nothing, scores = model(x)
            found += [loss.detach(), scores, *model(x, labels=labels)]
        assert nothing is None
        model.train()
    return found


@captures_of("evaluation inputs")
def _difference(pins: dict[str, Any]) -> float:
    pairs = zip(_trained(pins), _trained(None), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "pins", [{"pipeline": 2, "microbatches": 2}, {"data": 2, "zero": 3}], ids=["pipeline", "data"]
)
def test_as_eager_mode(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _difference, pins)) <= 1e-12


class Asks(Masked):
    """Doubles its result where no gradient is wanted."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        scores = self.head(self.second(self.first(x).tanh()))
        return F.cross_entropy(scores if torch.is_grad_enabled() else 2 * scores, labels)


class Typed(Masked):
    """The same as the refusal says."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        scores = self.head(self.second(self.first(x).tanh()))
        return F.cross_entropy(scores if self.training else 2 * scores, labels)


def _asked(kind: type[nn.Module], planned: bool) -> float | str:
    torch.manual_seed(0)
    model = kind().double()
    if planned:
        graphaccel.optimize(model, pipeline=2, microbatches=2)
    x, labels = torch.randn(8, 4).double(), torch.randint(5, (8,))
    model(x, labels).backward()
    model.eval()
    try:
        with torch.no_grad():
            return model(x, labels).item()
    except errors.StateFrozen as error:
        return str(error)


def test_a_forward_that_asks_whether_gradients_are_enabled(pool: Pool) -> None:
    for text in pool.run(2, _asked, Asks, True):
        assert "asks `torch.is_grad_enabled()`, and is evaluated by a graph" in str(text)
        assert "if self.training:" in str(text)
    for value in pool.run(2, _asked, Typed, True):
        assert value == pytest.approx(_asked(Asks, False), abs=1e-12)


def _of_another_width(pins: dict[str, Any]) -> str:
    """What the first evaluation says of a batch of another width; the next one is right."""
    torch.manual_seed(0)
    model = Masked()
    graphaccel.optimize(model, check="off", **pins)
    x, mask, labels = torch.randn(8, 4), torch.rand(8, 8), torch.randint(5, (8,))
    model(x, mask, labels)[0].backward()
    model.eval()
    with torch.no_grad():
        with pytest.raises(errors.BatchChanged) as caught:
            model(x[:, :3], labels=labels)
        model(x, labels=labels)
    return str(caught.value)


@pytest.mark.parametrize(
    "pins", [{"pipeline": 2, "microbatches": 2}, {"data": 2, "zero": 3}], ids=["pipeline", "data"]
)
def test_another_width_is_no_graph_that_is_missing(pool: Pool, pins: dict[str, Any]) -> None:
    for said in pool.run(2, _of_another_width, pins):
        first = said.splitlines()[0]
        assert first == "error[GA406]: shape of `args[0]` changed: captured with [b, 4], now [8, 3]"


@captures_of("evaluation inputs")
def _hooked(pins: dict[str, Any] | None) -> list[Tensor]:
    """Outputs of evaluations with a hook on an inner module, on every module, and with none."""
    torch.manual_seed(0)
    model = Masked().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if pins is not None:
        graphaccel.optimize(model, optimizer, **pins)
    x, labels = torch.randn(8, 4).double(), torch.randint(5, (8,))
    model(x, torch.ones(8, 8).double(), labels)[0].backward()
    optimizer.step()
    model.eval()
    seen: list[Tensor] = []

    def twice(module: nn.Module, args: Any, output: Any) -> Any:
        if module is not model.second:
            return None
        seen.append(output)
        return 2 * output

    for register in (model.second.register_forward_hook, register_module_forward_hook):
        with torch.no_grad():
            handle = register(twice)
            seen.append(model(x)[1])
            handle.remove()
            seen.append(model(x)[1])
    return seen


@pytest.mark.parametrize(
    "pins", [{"pipeline": 2, "microbatches": 2}, {"data": 2, "zero": 3}], ids=["pipeline", "data"]
)
def test_hooks_on_modules_run(pool: Pool, pins: dict[str, Any]) -> None:
    eager = _hooked(None)
    assert len(eager) == 6
    for found in pool.run(2, _hooked, pins):
        torch.testing.assert_close(found, eager, rtol=0, atol=1e-12)
