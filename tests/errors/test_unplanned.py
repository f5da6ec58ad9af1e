"""Training whose forwards are in evaluation mode: planned where the root module trains, else
refused before it updates anything."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors
from tests.support.untouched import refused

TEXT = """\
error[GA407]: optimizer.step() on gradients of forwards in evaluation mode only: no plan is made for these, nor used
  help: to train with dropout off and batch statistics fixed:  model.eval(); model.training = True
  help: to train as usual:  model.train()
  explain: graphaccel explain GA407"""


class Net(nn.Module):
    """Batch norm and dropout; returns its loss. Inputs [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.b = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.b(self.drop(self.norm(self.a(x)).tanh())), y)


def made() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Net().double()
    batches = [tuple(torch.randn(2, 4, 4).double()) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches


def test_training_in_evaluation_mode_is_refused_and_the_help_works() -> None:
    model, optimizer, batches = made()
    plain, plainly, _ = made()
    graphaccel.optimize(model, optimizer, devices=1)
    model.eval()
    model(*batches[0]).backward()
    with refused(errors.GraphMisuse, TEXT, model, optimizer):
        optimizer.step()
    optimizer.zero_grad()
    model.eval()
    model.training = True
    plain.eval()
    for batch in batches:
        for one, by in ((model, optimizer), (plain, plainly)):
            one(*batch).backward()
            by.step()
            by.zero_grad()
    assert model.graphaccel.plan is not None
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-12)


AROUND = """\
error[GA407]: optimizer.step() on gradients that no call of the optimized model computed: no plan is used
  help: call the model itself, not a module in it:  output = model(batch)
  help: or optimize the module that is called:  graphaccel.optimize(model.module, optimizer)
  explain: graphaccel explain GA407"""


class Wrapped(nn.Module):
    """A model in a model, as scripts have it that call `wrapped.module(...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.module(x, y)


def test_training_through_a_submodule_is_refused_and_the_help_works() -> None:
    model = Wrapped().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = tuple(torch.randn(2, 4, 4).double())
    graphaccel.optimize(model, optimizer, devices=1)
    model.module(*batch).backward()
    with refused(errors.GraphMisuse, AROUND, model, optimizer):
        optimizer.step()
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()
    assert model.graphaccel.plan is not None
    model = Wrapped().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model.module, optimizer, devices=1)
    model.module(*batch).backward()
    optimizer.step()
    assert model.module.graphaccel.plan is not None


@pytest.mark.parametrize("first", ["no_grad", "evaluation", "gradients of inputs"])
def test_a_first_call_that_does_not_train_leaves_the_plan_to_the_first_that_does(
    first: str,
) -> None:
    model, optimizer, batches = made()
    graphaccel.optimize(model, optimizer, devices=1)
    x, y = batches[0]
    if first == "gradients of inputs":
        model.eval()
        model(x.requires_grad_(), y).backward()
        optimizer.zero_grad()
        model.train()
        x = x.detach()
    elif first == "evaluation":
        model.eval()
        model(x, y)
        model.train()
    else:
        with torch.no_grad():
            model(x, y)
    assert model.graphaccel.plan is None
    model(x, y).backward()
    optimizer.step()
    assert model.graphaccel.plan is not None


def test_without_an_optimizer_it_is_said(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHACCEL_QUIET", "0")
    model, _, batches = made()
    graphaccel.optimize(model, devices=1)
    model.eval()
    for batch in batches:
        model(*batch).backward()
    said = capsys.readouterr().err
    assert said.count("graphaccel: not planned gradients of forwards in evaluation mode only") == 1
