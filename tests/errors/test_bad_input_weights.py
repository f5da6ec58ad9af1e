"""Weights that no plan could train, through `optimize`: class, full text, nothing half-changed."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH, Classifier, small_batch
from tests.support.untouched import refused

ELSEWHERE = nn.Linear(WIDTH, WIDTH)
SCALE = torch.ones(WIDTH, requires_grad=True)


class Lost(nn.Module):
    """way: which weight the forward reads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(WIDTH, WIDTH)
        self.heads, self.head = [nn.Linear(WIDTH, WIDTH)], {"a": nn.Linear(WIDTH, WIDTH)}
        self.scale = torch.ones(WIDTH, requires_grad=True)
        self.scales = [torch.ones(WIDTH, requires_grad=True)]
        self.view = self.layer.weight.detach()
        hidden = nn.Linear(WIDTH, WIDTH)
        self.closed = lambda x: hidden(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return getattr(self, f"_{self.way}")(x)

    def _list(self, x: Tensor) -> Tensor:
        return self.heads[0](x)

    def _dict(self, x: Tensor) -> Tensor:
        return self.head["a"](x)

    def _attribute(self, x: Tensor) -> Tensor:
        return x * self.scale

    def _attributes(self, x: Tensor) -> Tensor:
        return x * self.scales[0]

    def _closure(self, x: Tensor) -> Tensor:
        return self.closed(x)

    def _view(self, x: Tensor) -> Tensor:
        return x @ self.view


class Global(Lost):
    def forward(self, x: Tensor) -> Tensor:
        return ELSEWHERE(x) if self.way == "module" else self.layer(x) * SCALE


@pytest.mark.parametrize(
    ("way", "name", "line"),
    [
        ("list", "heads.0.weight", "self.heads = nn.ModuleList(self.heads)"),
        ("dict", "head.a.weight", "self.head = nn.ModuleDict(self.head)"),
        ("attribute", "scale", "self.scale = nn.Parameter(self.scale)"),
        ("attributes", "scales.0", "self.scales = nn.ParameterList(self.scales)"),
        ("module", "ELSEWHERE.weight", "self.ELSEWHERE = ELSEWHERE    # in __init__"),
        ("tensor", "SCALE", "self.SCALE = nn.Parameter(SCALE)    # in __init__"),
    ],
)
def test_a_weight_that_is_none_of_the_models(way: str, name: str, line: str) -> None:
    found = way in ("module", "tensor")
    kind = Global if found else Lost
    forward = kind.forward if found else getattr(Lost, f"_{way}")
    number = forward.__code__.co_firstlineno + 1
    code, part = {
        "list": ("return self.heads[0](x)", "self.heads[0](x)"),
        "dict": ('return self.head["a"](x)', 'self.head["a"](x)'),
        "attribute": ("return x * self.scale", "x * self.scale"),
        "attributes": ("return x * self.scales[0]", "x * self.scales[0]"),
        "module": (GLOBAL, "ELSEWHERE(x)"),
        "tensor": (GLOBAL, "self.layer(x) * SCALE"),
    }[way]
    under = " " * code.index(part) + "^" * len(part)
    method = f"{kind.__name__}.{forward.__name__}"
    text = f"""\
error[GA105]: cannot capture `{method}`: `inner.{name}` requires a gradient and is none of the model's parameters
  --> test_bad_input_weights.py:{number}
{number:>5} |         {code}
      |         {under}
  why:  it is not in model.parameters(), so no plan could hold, split or update it
  help: register it:  {line}
  help: or, if it is not to be trained, turn its gradient off:  weight.requires_grad_(False)
  explain: graphaccel explain GA105"""
    text = text.replace("`inner.ELSE", "`ELSE").replace("`inner.SCALE", "`SCALE")
    model = Classifier(kind(way))
    with refused(errors.UnregisteredWeight, text, model, torch.optim.AdamW(model.parameters())):
        graphaccel.optimize(model, example_batch=small_batch(), devices=1)


GLOBAL = 'return ELSEWHERE(x) if self.way == "module" else self.layer(x) * SCALE'


def test_a_closure_over_a_layer_of_its_own() -> None:
    with pytest.raises(errors.UnregisteredWeight) as caught:
        graphaccel.optimize(Classifier(Lost("closure")), example_batch=small_batch(), devices=1)
    assert (caught.value.name, caught.value.of) == ("`inner.closed.hidden.weight`", "")
    assert caught.value.line == "self.hidden = hidden    # in __init__"


class Centers(nn.Module):
    """A loss that has weights: the distances from trained centers."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.ones(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - self.centers).square().mean() + (output - target).square().mean()


class Inside(nn.Module):
    """As the help says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.criterion = nn.Linear(WIDTH, WIDTH), Centers()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.criterion(self.layer(x), target)


@pytest.mark.parametrize("way", ["module", "function", "of the model"])
def test_a_weight_of_the_loss_function(way: str) -> None:
    model, loss_fn = nn.Linear(WIDTH, WIDTH), Centers()
    if way == "of the model":
        model.criterion = loss_fn
    used = (lambda output, target: loss_fn(output, target)) if way == "function" else loss_fn
    batch = (torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    with pytest.raises(errors.UnregisteredWeight) as caught:
        graphaccel.optimize(model, loss_fn=used, example_batch=batch, devices=1)
    name = "`loss_fn.loss_fn.centers`" if way == "function" else "`loss_fn.centers`"
    assert caught.value.name == name
    assert caught.value.line.startswith("self.criterion = criterion    # in __init__, and call it")
    inside = graphaccel.optimize(Inside(), example_batch=batch, devices=1)
    inside(*batch).backward()
    assert inside.criterion.centers.grad is not None


def test_what_is_registered_as_said_is_trained() -> None:
    model = Classifier(Lost("list"))
    model.inner.heads = nn.ModuleList(model.inner.heads)
    graphaccel.optimize(model, example_batch=small_batch(), devices=1)
    model(*small_batch()).backward()
    assert model.inner.heads[0].weight.grad.abs().sum() > 0


def test_a_view_of_a_parameter() -> None:
    number = Lost._view.__code__.co_firstlineno + 1
    text = f"""\
error[GA105]: cannot capture `Lost._view`: `inner.view` is another tensor on the memory of `inner.layer.weight`
  --> test_bad_input_weights.py:{number}
{number:>5} |         return x @ self.view
      |                ^^^^^^^^^^^^^
  why:  the graph would keep its values of now, and not see an update of the other
  help: make it in forward:  self.inner.layer.weight.detach()
  explain: graphaccel explain GA105"""
    model = Classifier(Lost("view"))
    with refused(errors.UnregisteredWeight, text, model):
        graphaccel.optimize(model, example_batch=small_batch(), devices=1)
