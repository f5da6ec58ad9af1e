"""Comparisons that prove nothing, as a wrong graph gives the same: none counts as a proof."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphaccel
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler.model import as_batch
from graphaccel.errors import CaptureDiffers, PlanDiffers
from graphaccel.proof.comparison import Pair, pair_of
from graphaccel.proof.evidence import judge
from graphaccel.proof.first_step import prove
from graphaccel.proof.planned import Expected
from graphaccel.proof.results import Deviation, Results, deviations
from graphaccel.runtime.session import Session
from tests.proof.models import Net, Reverse, batch, captured, plain_step, seeded
from tests.proof.test_gate import lines, said  # noqa: F401
from tests.support.inside import captures_in

aten = torch.ops.aten
REVERSED = lambda _net, x: Reverse.apply(x)  # noqa: E731


def pair(given: Any, middle: Any = None, edit: Callable[[nn.Module], None] | None = None) -> Pair:
    """The graph of `Net()` beside a model with another middle, on a batch of its signature."""
    step, sizes = plain_step()
    model = seeded(lambda: Net(middle))
    if edit is not None:
        edit(model)
    return pair_of(model, None, step, given, sizes)


def spoilt(rows: int) -> Any:
    """The batch of `Net` with NaNs in the targets of its first rows."""
    x, y = batch().leaves
    y = y.clone()
    y[:rows] = torch.nan
    return as_batch((x, y))


class Ignoring(Net):
    """Its loss is the mean over the targets that are not ignored: NaN without any."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.middle(self, self.second(F.gelu(self.first(x))))
        return F.cross_entropy(self.last(hidden), target)


@pytest.mark.parametrize("middle", [None, REVERSED], ids=["right", "planted"])
def test_rows_without_a_loss_are_replaced_by_the_whole_batch(middle: Any) -> None:
    given = as_batch((batch().leaves[0], torch.tensor([-100, -100, 1, 2, 3, 4])))
    step, sizes = captured(seeded(Ignoring), given)
    made = pair_of(seeded(lambda: Ignoring(middle)), None, step, given, sizes)
    if middle is None:
        assert prove(made).text.startswith("loss and 6 gradients equal eager's (")
    else:
        with pytest.raises(CaptureDiffers) as caught:
            prove(made)
        assert caught.value.rows is None


@pytest.mark.parametrize("middle", [None, REVERSED], ids=["right", "planted"])
def test_nan_proves_nothing(middle: Any) -> None:
    made = prove(pair(spoilt(6), middle))
    assert not made.proved
    assert made.retry
    assert made.text == "eager's own loss is NaN or infinite on this batch"


def test_a_graph_that_overflows_alone_differs_although_float64_does_not() -> None:
    step = copy.deepcopy(plain_step()[0].graph)
    node = next(n for n in step.graph.nodes if n.target is aten.gelu.default)
    made, users = node, set(node.users)
    for factor in (1e30, 1e30, 1e-30, 1e-30):
        with step.graph.inserting_after(made):
            new = step.graph.call_function(aten.mul.Tensor, (made, factor))
        new.meta = {"phase": "forward", "val": node.meta["val"], "dims": node.meta["dims"]}
        made = new
    node.replace_all_uses_with(made, lambda user: user in users)
    right = pair(batch())
    with pytest.raises(CaptureDiffers) as caught:
        prove(replace(right, step=replace(right.step, graph=step)))
    assert caught.value.values[0].startswith("loss: ")


def test_zero_gradients_prove_nothing() -> None:
    def same(_net: Net, x: Tensor) -> Tensor:
        return x

    x, _ = batch().leaves
    model = seeded(lambda: Net(same))
    given = as_batch((x, model.last(model.second(F.gelu(model.first(x)))).detach()))
    step, sizes = plain_step()
    made = prove(pair_of(model, None, step, given, sizes))
    assert (made.proved, made.retry) == (False, True)
    assert made.text == "all 6 gradients of eager's are zero on this batch"


def test_gradients_that_are_zero_are_counted_apart() -> None:
    made = prove(pair(batch(), edit=lambda model: nn.init.zeros_(model.last.weight)))
    assert made.proved
    assert made.text.startswith("loss and 2 gradients equal eager's (")
    assert made.text.endswith("), 4 are zero on these rows")


def test_a_batch_without_rows_proves_nothing() -> None:
    given = pair(batch())
    made = prove(replace(given, sizes={BATCH: 0}))
    assert (made.proved, made.text) == (False, "the batch has no rows")


NONE = Results(None, {}, {}, {}, {})


@pytest.mark.parametrize(
    ("values", "trained", "text"),
    [
        (NONE, False, "there is no number to compare"),
        (replace(NONE, loss=torch.empty(0)), False, "there is no number to compare"),
        (replace(NONE, loss=torch.ones(())), True, "no parameter gets a gradient"),
        (replace(NONE, outputs={0: torch.full((3,), torch.nan)}), False, "own output 0 is NaN"),
        (
            replace(NONE, gradients={"a": torch.ones(2), "b": torch.tensor([1.0, torch.inf])}),
            True,
            "1 of eager's own 2 gradients are NaN or infinite on this batch, first the gradient of "
            "`b`",
        ),
    ],
)
def test_values_that_prove_nothing(values: Results, trained: bool, text: str) -> None:
    found = deviations(values, values, torch.float32)
    assert not any(one.wrong for one in found)
    made = judge(found, trained=trained)
    assert not made.proved
    assert text in made.text


def test_no_gradient_is_right_where_nothing_is_trained() -> None:
    found = (Deviation("output 0", 0.0, 1e-5, kind="output"),)
    assert judge(found, trained=False).text == "outputs and 0 gradients equal eager's (exactly)"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "there is no finite number to compare"),
        ({"loss": (torch.nan, torch.nan)}, "one device's own loss is NaN or infinite"),
        (
            {"loss": (1.0, 1.0), "gradient of `a`": (torch.inf, 1.0)},
            "one device's own gradient of `a` is NaN or infinite",
        ),
        ({"loss": (1.0, 1.0), "gradient of `a`": (0.0, 0.0)}, "all 1 gradients are zero"),
    ],
)
def test_a_planned_step_with_such_values_is_not_proved(values: Any, text: str) -> None:
    class Alone:
        world = 1

    step = {name: ((), *sums) for name, sums in values.items()}
    assert Expected("plan", "float32", values).check(step, Alone()) == text  # type: ignore[arg-type]


def optimized(middle: Any = None) -> nn.Module:
    """A model under a plan for one device."""
    model = seeded(lambda: Net(middle))
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.0), devices=1)
    captures_in(model).steps[(batch().signature(), True)] = plain_step()[0]
    return model


def test_the_next_batch_is_compared_instead(said: pytest.CaptureFixture) -> None:  # noqa: F811
    model = optimized()
    model(*spoilt(6).leaves)
    assert [": not proved" in line for line in lines(said)] == [True, True]
    model(*batch().leaves)
    assert len([line for line in lines(said) if ": proved" in line]) == 2
    model(*spoilt(6).leaves)
    assert lines(said) == []


def test_batches_are_not_compared_for_ever(said: pytest.CaptureFixture) -> None:  # noqa: F811
    model = optimized()
    counts = []
    for _ in range(5):
        model(*spoilt(6).leaves)
        counts.append(len(lines(said)))
    assert counts == [2, 2, 2, 2, 0]


def test_a_planted_capture_is_found_by_the_next_batch() -> None:
    model = optimized(REVERSED)
    model(*spoilt(6).leaves)
    for _ in range(2):
        with pytest.raises(CaptureDiffers):
            model(*batch().leaves)


def test_a_planted_plan_is_found_by_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    def scaled(*args: Any) -> Any:
        result = step(*args)
        next(iter(result.gradients.values())).mul_(1.01)
        return result

    monkeypatch.setattr(Session, "step", scaled)
    model = optimized()
    model(*spoilt(6).leaves)
    with pytest.raises(PlanDiffers):
        model(*batch().leaves)


class Centred(nn.Module):
    """The running mean of what a batch norm has centred is rounding: terms that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        with torch.no_grad():
            self.mean.lerp_(self.mean_of(x), 0.1)
        return x.pow(3).mean()

    def mean_of(self, x: Tensor) -> Tensor:
        """The same, in one of two orders."""
        return x.mean(0) if torch.compiler.is_exporting() else x.flip(0).sum(0) / len(x)


def test_a_buffer_that_is_rounding_differs_in_no_way_that_matters() -> None:
    given, model = batch(targets=False), seeded(Centred)
    step, sizes = captured(model, given)
    assert prove(pair_of(model, None, step, given, sizes)).proved
    model.mean_of = lambda x: x[0]
    with pytest.raises(CaptureDiffers, match="new value of `mean`"):
        prove(pair_of(model, None, step, given, sizes))
