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


def _resize(model: nn.Module) -> None:
    model.inner.bias = nn.Parameter(torch.zeros(1))


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
    "resize": (
        _resize,
        "parameter `inner.bias` had the shape [8] when the step was captured, and has [1] now",
        LAYERS,
    ),
    "convert": (
        nn.Module.double,
        "parameter `inner.weight` was torch.float32 when the step was captured, and is torch.float64 now",
        "convert the model back:  model.to(torch.float32)\n"
        "  help: or convert it before:  graphaccel.optimize(model.to(torch.float64), optimizer)",
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


class Shifted(Classifier):
    """A classifier with a buffer that scales its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = super().forward(*batch)
        return loss if self.scale is None else loss * self.scale.sum() / self.scale.shape[0]


@pytest.mark.parametrize(
    ("value", "became"), [(None, "None"), (torch.ones(2), "torch.float32 [2]")]
)
def test_a_buffer_that_becomes_another(value: torch.Tensor | None, became: str) -> None:
    model = Shifted()
    graphaccel.optimize(model, devices=1, example_batch=small_batch())
    model(*small_batch()).backward()
    model.scale = value
    with pytest.raises(GraphMisuse) as caught:
        model(*small_batch())
    assert str(caught.value) == (
        f"error[GA407]: buffer `scale` was torch.float32 [4] when the step was captured, and is {became} now\n"
        "  help: write values into it:  with torch.no_grad(): buffer.copy_(values)\n"
        "  explain: graphaccel explain GA407"
    )


def test_the_help_works() -> None:
    for change in (_tie, _untie, _drop):
        model = _tied()
        change(model)
        plain = model(*small_batch()).item()
        graphaccel.optimize(model, devices=1)
        assert model(*small_batch()).item() == pytest.approx(plain, rel=1e-6)
