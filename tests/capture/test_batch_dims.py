"""On which dim of each input the batch lies: as it was said, or as captures and rules show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.capture import forward
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.batch_dims import assignments, given_dims
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import as_batch, model_of
from graphaccel.errors import GraphMisuse, SplitRefused
from graphaccel.planner.cluster.catalogue import cluster
from tests.support.small import Classifier, small_batch


class TimeMajor(nn.Module):
    """A recurrent layer over (time, batch, features), and targets alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x)[0], y)


class Stated(nn.Module):
    """An LSTM that is given its state, (layers, batch, features) each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, 1, batch_first=True)

    def forward(self, x: Tensor, y: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.layer(x, state)[0], y)


class Mixing(nn.Module):
    """Every example meets every other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) @ x.T).softmax(0).square().sum().sqrt()


class Merged(nn.Module):
    """Tokens (time, batch) and two states (2, batch, features) → scores (time x batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        first, second = states
        return (
            self.last(self.table(tokens) * first + second)
            .cumsum(0)
            .logcumsumexp(1)
            .view(-1, 4)
            .log_softmax(1)
        )


def _step(model: nn.Module, batch: Any, devices: int = 2, **said: Any) -> Any:
    what = model_of(model, None, None, "cpu", **said)
    return Compiler(what, cluster("cpu", devices), {}).capture(as_batch(batch))[0]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each export."""
    calls: list[int] = []
    real = forward.export_forward

    def counted(*arguments: Any) -> Any:
        calls.append(len(calls))
        return real(*arguments)

    monkeypatch.setattr(forward, "export_forward", counted)
    return calls


def test_a_refused_split_names_the_op_at_a_size_that_can_change() -> None:
    """Not the number of states, with which the forward runs at one size only."""
    batch = (torch.zeros(7, 4, dtype=torch.int64), torch.zeros(2, 4, 4))
    with pytest.raises(SplitRefused) as caught:
        graphaccel.plan(Merged(), batch, loss_fn="outside", devices=2, data=2, device="h100-80gb")
    assert "logcumsumexp" in str(caught.value).splitlines()[0]


@pytest.mark.parametrize("batch", [8, 3], ids=["several sizes", "time is the batch"])
def test_time_major(batch: int) -> None:
    x = torch.randn(3, batch, 4)
    step = _step(TimeMajor(), (x, x))
    assert step.batch_dims == {0: 1, 1: 1}
    assert [*step.sizes.values()] == [batch]


def test_a_state_has_the_batch_behind_its_layers(exports: list[int]) -> None:
    x, state = torch.randn(4, 2, 4), torch.zeros(1, 4, 4)
    for devices in (1, 2):
        step = _step(Stated(), (x, x, (state, state)), devices)
        assert step.batch_dims == {0: 0, 1: 0, 2: 1, 3: 1}
        assert [*step.sizes.values()] == [4]
    assert len(exports) == 4


@pytest.mark.parametrize("devices", [1, 2])
def test_where_leading_sizes_agree_nothing_more_is_exported(
    exports: list[int], devices: int
) -> None:
    assert _step(Classifier(), small_batch(), devices).batch_dims == {0: 0, 1: 0}
    assert len(exports) == 2


def test_a_batch_that_can_not_be_split_stays_where_it_leads(exports: list[int]) -> None:
    step = _step(Mixing(), torch.randn(6, 4))
    assert step.batch_dims == {0: 0}
    assert len(exports) == 3  # and one that fails at the first layer


def test_what_may_be_the_batch() -> None:
    vector, state = torch.zeros(8), torch.zeros(2, 8, 3)
    assert assignments(as_batch((vector, state)))[0] == {0: 0, 1: 1}
    assert assignments(as_batch((vector, vector))) == [{0: 0, 1: 0}]
    assert assignments(as_batch((torch.tensor(1.0),))) == [{}]


def test_said_dims_are_not_searched_for(exports: list[int]) -> None:
    x = torch.randn(3, 3, 4)
    assert _step(TimeMajor(), (x, x), batch_dims=1).batch_dims == {0: 1, 1: 1}
    assert len(exports) == 2


def _forward(x: Tensor, y: Tensor, state: Any = None) -> None:
    """Names of inputs."""


@pytest.mark.parametrize(
    ("said", "dims"),
    [
        (-1, {0: 1, 1: 1, 2: 2, 3: 2}),
        ({"x": 1}, {0: 1, 2: 0, 3: 0}),
        ({0: 1, 1: 1}, {0: 1, 1: 1, 2: 0, 3: 0}),
        ({"x": 0, "state": 1}, {0: 0, 1: 0, 2: 1, 3: 1}),
        ({"args[0]": 0, "state[0]": 1, "state[1]": None}, {0: 0, 1: 0, 2: 1}),
        ({"x": None}, {}),
    ],
)
def test_said(said: Any, dims: dict[int, int]) -> None:
    matrix, state = torch.zeros(4, 2), torch.zeros(2, 4, 2)
    batch = flatten_call((matrix, matrix), {"state": (state, state)})
    assert given_dims(batch, said, _forward) == dims


HELP = """
  help: graphaccel.optimize(model, optimizer, batch_dims={'tokens': 1, 0: 1})  # the dim of the \
examples, by the name or position of an input
  explain: graphaccel explain GA407"""


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"z": 0}, "there is no input 'z'; there are: args[0], args[1]"),
        ({"x": 2}, "`args[0]` has the shape [8, 8] and no dim 2"),
        ("leading", "'leading' is neither a dim nor a dim for each input"),
        ({"x": True}, "{'x': True} is neither a dim nor a dim for each input"),
    ],
)
def test_dims_that_are_not_there(said: Any, text: str) -> None:
    for run in (
        lambda: graphaccel.optimize(Classifier(), example_batch=small_batch(), batch_dims=said),
        lambda: graphaccel.plan(Classifier(), small_batch(), devices=1, batch_dims=said),
    ):
        with pytest.raises(GraphMisuse) as caught:
            run()
        assert str(caught.value) == f"error[GA407]: batch_dims: {text}{HELP}"


def test_dims_of_several_sizes() -> None:
    with pytest.raises(GraphMisuse, match=r"several sizes: \{'args\[0\]': 5, 'args\[1\]': 4\}"):
        given_dims(as_batch((torch.zeros(4, 5), torch.zeros(4))), {"x": 1, "y": 0}, _forward)
