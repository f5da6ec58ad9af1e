"""The proof at the first step on two ranks: one decides for all, and all stop together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import GraphAccelError
from graphaccel.passes.gradients import accumulate_gradients
from graphaccel.proof import gate, planned
from graphaccel.runtime.execution.executor import Executor
from graphaccel.runtime.execution.external_loss import ExternalLossExecutor
from graphaccel.runtime.execution.state import StepResult
from graphaccel.runtime.session import Session
from tests.proof.models import Net, Reverse, batch, seeded
from tests.support.captures import captures_of
from tests.support.inside import is_closed
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

DATA: Mapping[str, Any] = {"data": 2}
PLANS = (DATA, {"data": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}, {"tensor": 2})


@contextmanager
def lost_sum() -> Iterator[None]:
    """A pass that forgets to sum gradients over the data axis."""
    with patch.object(accumulate_gradients.Accumulation, "reduce", lambda *_: None):
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


class Dropped(Net):
    """With dropout; `Outside` returns what the loss is computed of."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: F.dropout(x, 0.4, net.training))


class Outside(Net):
    """Its loss is the script's."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.last(self.second(F.gelu(self.first(x))))


@contextmanager
def scaled_outside() -> Iterator[None]:
    """A backward behind a loss outside in which one gradient of rank 1 is 1.01 times what it is."""
    backward = ExternalLossExecutor.backward

    def scaled(*args: Any, **settings: Any) -> Any:
        gradients, inputs = backward(*args, **settings)
        if dist.get_rank() == 1:
            next(iter(gradients.values())).mul_(1.01)
        return gradients, inputs

    with patch.object(ExternalLossExecutor, "backward", scaled):
        yield


@contextmanager
def scaled_run() -> Iterator[None]:
    """An executor in which one gradient of rank 1 is 1.01 times what it is."""
    run = Executor.run

    def scaled(*args: Any) -> StepResult:
        result = run(*args)
        if dist.get_rank() == 1:
            next(iter(result.gradients.values())).mul_(1.01)
        return result

    with patch.object(Executor, "run", scaled):
        yield


TRIALS: Mapping[str, tuple[type[Net], Mapping[str, Any]]] = {
    "random draws": (Dropped, DATA),
    "random draws in a pipeline": (Dropped, {"pipeline": 2, "microbatches": 2}),
    "random draws over tensors": (Dropped, {"tensor": 2}),
    "loss outside": (Outside, {**DATA, "loss_fn": "outside"}),
    "loss outside, another batch before": (Outside, {**DATA, "loss_fn": "outside"}),
    "another batch before": (Net, {"data": 2, "zero": 3}),
}


@captures_of("first step trials")
def _tried(case: str, fault: bool) -> tuple[str, str, bool]:
    """(code, what was said of the plan's step, whether state is as without a trial)."""
    kind, pins = TRIALS[case]
    model: nn.Module = seeded(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = batch().leaves[: 1 if kind is Outside else 2]
    if case.endswith("another batch before"):
        pins = {**pins, "example_batch": inputs}
        inputs = tuple(2 * x for x in inputs)
    said: list[str] = []
    wrong = scaled_outside if kind is Outside else scaled_run
    code, random = "", torch.random.get_rng_state()
    with wrong() if fault else nullcontext(), patch.object(gate, "progress", _note(said)):
        with patch.object(planned, "progress", _note(said)):
            graphaccel.optimize(model, optimizer, devices=2, **pins)
            try:
                model(*inputs)
            except GraphAccelError as error:
                code = error.code
    drawn = not torch.equal(torch.random.get_rng_state(), random)
    return (
        code,
        "; ".join(said),
        is_closed(model) is fault and drawn is (kind is Dropped and not fault),
    )


def _note(said: list[str]) -> Callable[[str, str, float], None]:
    return lambda phase, what, seconds: said.append(f"{phase} {what}")


@pytest.mark.parametrize("case", TRIALS)
def test_a_trial_step_stands_for_one_that_can_not_be_compared(pool: Pool, case: str) -> None:
    for code, said, as_before in pool.run(2, _tried, case, False):
        assert code == ""
        assert said.startswith("proved")
        assert "6 gradients of the plan's step equal one device's" in said
        assert ("random draws held constant" in said) is case.startswith("random")
        assert as_before


@pytest.mark.parametrize("case", TRIALS)
def test_a_wrong_trial_step_stops_all_ranks(pool: Pool, case: str) -> None:
    for code, said, as_before in pool.run(2, _tried, case, True):
        assert code == "GA109"
        assert said == ""
        assert as_before


@captures_of("first step trials")
def _first_loss(check: str) -> tuple[float, float]:
    """(loss of the first step, a random number behind it)."""
    model = seeded(Dropped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=2, check=check, **DATA)
    return model(*batch().leaves).item(), torch.rand(()).item()


def test_a_trial_step_changes_nothing(pool: Pool) -> None:
    assert pool.run(2, _first_loss, "first-step") == pool.run(2, _first_loss, "off")


@captures_of("first step")
def _passed(pins: Mapping[str, Any]) -> bool:
    model = seeded(Net)
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=2, **pins)
    model(*batch().leaves).backward()
    return is_closed(model)


@pytest.mark.parametrize("pins", PLANS)
def test_right_plans_pass(pool: Pool, pins: Mapping[str, Any]) -> None:
    assert pool.run(2, _passed, pins) == [False, False]
