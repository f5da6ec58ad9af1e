"""Forwards with submodules of any name, vmapped or unlisted weights, and anomaly mode around the
step, against eager mode in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.support.steps import WIDTH, assert_as_eager


class Heads(nn.Module):
    """Heads under names that are Python keywords or no names at all, one of them without a use."""

    def __init__(self) -> None:
        super().__init__()
        heads = {name: nn.Linear(WIDTH, WIDTH) for name in ("class", "a b", "lambda", "1")}
        self.heads = nn.ModuleDict(heads)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.heads["a b"](x)) + self.heads["1"](x)
        return F.mse_loss(self.heads["class"](hidden), y)


class Ensemble(nn.Module):
    """Three stacked layers, each applied to the batch by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def loss(weight: Tensor, bias: Tensor) -> Tensor:
            return F.mse_loss(torch.tanh(x @ weight + bias), y)

        return torch.vmap(loss)(self.weight, self.bias).mean()


class Alike(nn.Module):
    """Weights whose names differ in what is no letter or number; the second is a template's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layer_1, self.w = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.w_ = nn.Parameter(torch.randn(WIDTH))
        self.template = [nn.Linear(WIDTH, WIDTH, device="meta")]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer[1](self.layer[0](x)) * self.w + self.w_)
        named: dict[str, Tensor] = dict(self.layer_1.named_parameters())
        return F.mse_loss(functional_call(self.template[0], named, (hidden,)), y)


class Listed(Heads):
    """Lists the parameters of one head for the optimizer."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.heads["class"].parameters(recurse)


def test_submodules_named_like_keywords() -> None:
    assert_as_eager(Heads)


def test_parameters_with_names_that_are_alike_and_a_template_without_data() -> None:
    assert_as_eager(Alike)


def test_parameters_under_vmap() -> None:
    assert_as_eager(Ensemble)


def test_parameters_that_the_class_does_not_list() -> None:
    assert_as_eager(Listed)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_around_the_step() -> None:
    with torch.autograd.detect_anomaly():
        assert_as_eager(Heads)
