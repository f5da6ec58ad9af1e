"""Parameters that are tied, untied, taken away or added after a step was captured: refused."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel.errors import GraphMisuse
from tests.support.captures import captures_of
from tests.support.small import Classifier, small_batch

LAYERS = "change the layers of the model before:  graphaccel.optimize(model, optimizer)"
TIES = "tie weights before:  graphaccel.optimize(model, optimizer)"


def _tie(model: nn.Module) -> None:
    model.out.bias = model.inner.bias


def _untie(model: nn.Module) -> None:
    model.out.weight = nn.Parameter(model.inner.weight.detach().clone())


def _drop(model: nn.Module) -> None:
    model.inner.bias = None


def _add(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


CHANGES: dict[str, tuple[Callable[[nn.Module], None], str, str]] = {
    "tie": (
        _tie,
        "`inner.bias` and `out.bias` were two parameters when the step was captured, and are one now",
        TIES,
    ),
    "untie": (
        _untie,
        "`inner.weight` and `out.weight` were one when the step was captured, and are two now",
        TIES,
    ),
    "drop": (
        _drop,
        "the model had a parameter `inner.bias` when the step was captured, and has none now",
        LAYERS,
    ),
    "add": (
        _add,
        "the model had no parameter `extra.weight` when the step was captured",
        LAYERS,
    ),
}


def _tied() -> nn.Module:
    model = Classifier()
    model.out = nn.Linear(8, 8)
    model.out.weight = model.inner.weight
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_after_the_first_step(name: str) -> None:
    change, what, help_line = CHANGES[name]
    model = _tied()
    with captures_of("registered"):
        graphaccel.optimize(model, devices=1, example_batch=small_batch())
    model(*small_batch()).backward()
    change(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(GraphMisuse) as caught:
        model(*small_batch())
    assert str(caught.value) == (
        f"error[GA407]: {what}\n  help: {help_line}\n  explain: graphaccel explain GA407"
    )
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(before[parameter_name], parameter)


def test_the_help_works() -> None:
    for change in (_tie, _untie, _drop):
        model = _tied()
        change(model)
        plain = model(*small_batch()).item()
        graphaccel.optimize(model, devices=1)
        assert model(*small_batch()).item() == pytest.approx(plain, rel=1e-6)
