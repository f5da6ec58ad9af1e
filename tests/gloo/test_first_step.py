"""The proof at the first step on two ranks: one decides for all, and all stop together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import GraphAccelError
from graphaccel.passes import accumulate_gradients
from graphaccel.runtime.executor import StepResult
from graphaccel.runtime.session import Session
from tests.proof.models import Net, Reverse, batch, seeded
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

DATA: Mapping[str, Any] = {"data": 2}
PLANS = (DATA, {"data": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}, {"tensor": 2})


@contextmanager
def lost_sum() -> Iterator[None]:
    """A pass that forgets to sum gradients over the data axis."""
    with patch.object(accumulate_gradients._Accumulating, "_reduce", lambda *_: None):
        yield


@contextmanager
def scaled_on_rank_1() -> Iterator[None]:
    """A runtime in which one gradient of one rank is 1.01 times what it is."""
    step = Session.step

    def scaled(*args: Any) -> StepResult:
        result = step(*args)
        if dist.get_rank() == 1:
            next(iter(result.gradients.values())).mul_(1.01)
        return result

    with patch.object(Session, "step", scaled):
        yield


@contextmanager
def forgotten() -> Iterator[None]:
    """A model that does in its middle what no capture sees."""

    def middle(_net: Net, x: Tensor) -> Tensor:
        return x if torch.compiler.is_exporting() else Reverse.apply(x)

    init = Net.__init__
    with patch.object(Net, "__init__", lambda net, _=None: init(net, middle)):
        yield


@captures_of("first step")
def _refused(fault: Callable[[], Any], pins: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    with fault():
        model: nn.Module = seeded(Net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphaccel.optimize(model, optimizer, devices=2, **pins)
        try:
            model(*batch().leaves)
        except GraphAccelError as error:
            return error.code, error.values  # type: ignore[attr-defined]
    return "", ()


@pytest.mark.parametrize(
    ("fault", "pins", "code"),
    [
        (lost_sum, DATA, "GA109"),
        *((scaled_on_rank_1, pins, "GA109") for pins in PLANS),
        (forgotten, DATA, "GA108"),
    ],
)
def test_all_ranks_stop(pool: Pool, fault: Any, pins: Mapping[str, Any], code: str) -> None:
    codes, values = zip(*pool.run(2, _refused, fault, pins), strict=True)
    assert codes == (code, code)
    assert values[0] == values[1]
    assert values[0]
    if fault is scaled_on_rank_1:
        assert all("gradient of `" in value for value in values[0])


@captures_of("first step")
def _passed(pins: Mapping[str, Any]) -> bool:
    model = seeded(Net)
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=2, **pins)
    model(*batch().leaves).backward()
    return model.graphaccel._gate.closed


@pytest.mark.parametrize("pins", PLANS)
def test_right_plans_pass(pool: Pool, pins: Mapping[str, Any]) -> None:
    assert pool.run(2, _passed, pins) == [False, False]
