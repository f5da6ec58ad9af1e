"""A loss that is NaN in one step: an error, or no update, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero3": {"data": 2, "zero": 3},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}


def _batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches; the last row of the second, of one data rank only, is infinite."""
    batches = [small_batch(seed=seed) for seed in range(3)]
    batches[1][0][-1] = float("inf")
    return [(x.double(), y) for x, y in batches]


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Classifier().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@captures_of("nonfinite")
def _skipped(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = _model()
    graphaccel.optimize(model, optimizer, devices=2, on_nonfinite="skip", **PLANS[kind])
    losses = []
    for batch in _batches():
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, graphaccel.full_state_dict(model)


@pytest.mark.parametrize("kind", PLANS)
def test_a_skipped_step_is_one_that_was_not_there(pool: Pool, kind: str) -> None:
    model, optimizer = _model()
    expected = []
    for batch in _batches()[::2]:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, state in pool.run(2, _skipped, kind):
        assert losses[1] != losses[1]  # NaN
        assert losses[::2] == pytest.approx(expected, rel=1e-12)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


@captures_of("nonfinite")
def _refused() -> list[str]:
    model, optimizer = _model()
    graphaccel.optimize(model, optimizer, devices=2, data=2, on_nonfinite="error")
    said = []
    for batch in _batches():
        try:
            model(*batch).backward()
            said.append("done")
        except errors.NonFiniteLoss as error:
            said.append(str(error).splitlines()[0])
    return said


def test_the_error_is_raised_on_every_rank(pool: Pool) -> None:
    text = "error[GA416]: the loss of training step 2 is nan"
    assert pool.run(2, _refused) == [["done", text, "done"]] * 2


def test_policies_and_losses_that_are_seen() -> None:
    model, optimizer = _model()
    with pytest.raises(errors.BadPin, match="on_nonfinite"):
        graphaccel.optimize(model, optimizer, devices=1, on_nonfinite="stop")
    linear = nn.Linear(8, 4)
    graphaccel.optimize(linear, devices=1, loss_fn="outside", on_nonfinite="skip")
    with pytest.raises(errors.GraphMisuse, match="the script computes the loss itself"):
        linear(torch.randn(4, 8))
