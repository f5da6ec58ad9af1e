"""A smaller last batch on two processes: equal to eager on the rows that there are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.compiler.test_ignored_rows import Tagger, batch, shifted
from tests.compiler.test_two_lengths import Translator, pairs
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

ROWS = (4, 3, 1, 4)


def _trained(pins: dict[str, Any]) -> float:
    """Largest difference of losses and weights from eager code, which trains on the same rows."""
    torch.manual_seed(0)
    plain = Tagger(shifted).double()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=2, **pins)
    furthest = 0.0
    for step, rows in enumerate(ROWS):
        losses = []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(*batch(rows, step))["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        furthest = max(furthest, abs(losses[0] - losses[1]))
    return max(furthest, _apart(plain, ours))


def _apart(plain: nn.Module, ours: nn.Module) -> float:
    state = graphaccel.full_state_dict(ours)
    return max((state[n] - v).abs().max().item() for n, v in plain.state_dict().items())


@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": 2, "microbatches": 2}], ids=str)
def test_the_loss_of_the_model(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _trained, pins)) < 1e-12


def _translated(pins: dict[str, Any]) -> float:
    torch.manual_seed(0)
    plain = Translator().double()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=2, **pins)
    lengths = ((8, 6), (5, 9), (7, 7), (4, 12))
    for rows, (read, written) in zip(ROWS, lengths, strict=True):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(*pairs(rows, read, written).leaves).backward()
            optimizer.step()
    return _apart(plain, ours)


@pytest.mark.parametrize("pins", [{"data": 2}, {"pipeline": 2, "microbatches": 2}], ids=str)
def test_two_lengths_that_change_with_the_rows(pool: Pool, pins: dict[str, Any]) -> None:
    assert max(pool.run(2, _translated, pins)) < 1e-12


class Regressor(nn.Module):
    """[B, 3] → [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)))


def _outside() -> float:
    torch.manual_seed(0)
    plain = Regressor().double()
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=2, data=2)
    for rows in ROWS:
        x = torch.linspace(-1, 1, 3 * rows, dtype=torch.float64).view(rows, 3)
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            made = model(x)
            assert made.shape == (rows, 2)
            F.mse_loss(made, x[:, :2]).backward()
            optimizer.step()
    return _apart(plain, ours)


def test_a_loss_of_the_script_needs_no_mark(pool: Pool) -> None:
    assert max(pool.run(2, _outside)) < 1e-12


class Counting(Tagger):
    """Returns how many rows there are beside its loss."""

    def forward(self, *args: Any) -> dict[str, Any]:
        return {"loss": super().forward(*args)["loss"], "rows": len(args[0])}


def _counted(pins: dict[str, Any]) -> str:
    """What is raised for a batch that is completed, behind one that is not."""
    model = Counting(shifted).double()
    graphaccel.optimize(model, devices=2, **pins)
    for rows in (4, 8, 2):
        assert model(*batch(rows, rows))["rows"] == rows
        with torch.no_grad():
            assert model.eval()(*batch(rows + 1, rows))["rows"] == rows + 1
        model.train()
    with pytest.raises(errors.BatchNotDivisible) as caught:
        model(*batch(3, 0))
    return str(caught.value)


@pytest.mark.parametrize(
    "pins", [{"data": 2}, {"pipeline": 2, "microbatches": 2}, {"data": 2, "zero": 3}], ids=str
)
def test_a_number_of_rows_that_is_returned(pool: Pool, pins: dict[str, Any]) -> None:
    (text,) = {*pool.run(2, _counted, pins)}
    assert "what the model returns besides tensors depends on the number of rows" in text
