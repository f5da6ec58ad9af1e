"""Gradient rules that no graph can have, through `optimize`: class, text, nothing half-changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH, Classifier, small_batch
from tests.support.untouched import refused

WEIGHT = torch.ones(WIDTH)
KEPT: list[Tensor] = []


class Double(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Any = None) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2, None


class Apart(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


class InPlace(Double):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Any = None) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Closed(Double):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Any = None) -> Tensor:
        return x * WEIGHT


class Late(Double):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * WEIGHT, None


class Branch(Double):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient if gradient.sum() > 0 else -gradient), None


class Given(Double):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: nn.Module) -> Tensor:
        return other(x)


def _keep(gradient: Tensor) -> Tensor:
    KEPT.append(gradient)
    return gradient


class Ruled(nn.Module):
    """way: what its forward does with an activation."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.way == "in place":
            return InPlace.apply(h + 0, None)
        if self.way == "closed":
            return Closed.apply(h, None)
        if self.way == "late":
            return Late.apply(h, None)
        if self.way == "branch":
            return Branch.apply(h, None)
        if self.way == "module":
            return Given.apply(h, self.layer)
        if self.way == "list":
            return Double.apply(h, [h])
        if self.way == "vmap":
            return torch.func.vmap(Apart.apply)(h)
        if self.way == "twice":
            return h + torch.autograd.grad(Double.apply(h, None).sum(), h)[0]
        if self.way == "prints":
            h.register_hook(lambda g: print(g.shape))
        if self.way == "keeps":
            h.register_hook(_keep)
        if self.way == "reads":
            h.register_hook(lambda g: g * WEIGHT)
        if self.way == "shape":
            h.register_hook(lambda g: g[0])
        if self.way == "retained":
            h.retain_grad()
        if self.way == "node":
            h.grad_fn.register_prehook(lambda g: None)
        if self.way == "several":
            torch.autograd.graph.register_multi_grad_hook([h], lambda g: None)
        if self.way == "own":
            self.layer.weight.register_hook(lambda g: g * 2)
        if self.way == "after":
            self.layer.weight.register_post_accumulate_grad_hook(lambda p: None)
        if self.way == "module hook":
            self.layer.register_full_backward_hook(lambda *_: None)
            return self.layer(h)
        if self.way == "saved":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
                h = h * h
        if self.way == "set":
            h.data = x
        if self.way == "shared":
            self.frozen.weight.data = self.layer.weight.data
        if self.way == "old":
            old = self.frozen.weight.data
            self.frozen.weight.data = old * 0.5
            return h @ old
        if self.way == "written":
            h.data.mul_(2)
        return h


SET = ("a write to `.data`", "gradients would not know of the new value")
TEXTS = {
    "in place": ("the backward of `InPlace`", "its forward writes over its input (mark_dirty)"),
    "closed": (
        "the backward of `Closed`",
        "it reads a tensor of shape [8] that is not among its arguments",
    ),
    "late": (
        "the backward of `Late`",
        "it reads a tensor of shape [8] that is not among its arguments",
    ),
    "branch": ("the backward of `Branch`", "it does not run on tensors without values: "),
    "module": (
        "the backward of `Given`",
        "it reads a tensor of shape [8, 8] that is not among its arguments",
    ),
    "list": (
        "the backward of `Double`",
        "a tensor in a list or dict is no input of it: it has no gradient there",
    ),
    "vmap": ("the backward of `Apart`", "it is applied inside of a transform of torch.func"),
    "twice": (
        "the backward of `Double`",
        "the forward itself asks for a gradient through it (torch.autograd.grad)",
    ),
    "prints": (
        "the hook on a tensor",
        "it returns None: what it does with the gradient would be done once, at capture",
    ),
    "keeps": (
        "the hook on a tensor",
        "it keeps the gradient, which would be that of the capture for ever",
    ),
    "reads": (
        "the hook on a tensor",
        "it reads a tensor of shape [8] that is not among its arguments",
    ),
    "shape": ("the hook on a tensor", "it returns another shape"),
    "retained": (
        "`retain_grad()` of an activation",
        "activations are values of one graph, whose gradients nobody keeps",
    ),
    "node": (
        "what is asked of `grad_fn`",
        "the graph has nodes of its own, to which hooks on these do not belong",
    ),
    "several": (
        "what is asked of `grad_fn`",
        "the graph has nodes of its own, to which hooks on these do not belong",
    ),
    "own": ("a hook on the gradient of a parameter", "each call of the forward would add one more"),
    "after": (
        "a hook on the gradient of a parameter",
        "each call of the forward would add one more",
    ),
    "module hook": (
        "a backward hook on a module",
        "modules are not called when the step runs as one graph",
    ),
    "saved": (
        "a hook on saved tensors (saved_tensors_hooks)",
        "the plan decides what is saved of the forward, and what is computed again",
    ),
    "set": SET,
    "shared": SET,  # from then on with the weight that is trained
    "old": SET,  # which is read afterwards
}


@pytest.mark.parametrize("way", TEXTS)
def test_what_is_refused(way: str) -> None:
    model = Classifier(Ruled(way))
    with pytest.raises(errors.GradientRuleRefused) as caught:
        graphaccel.optimize(model, example_batch=small_batch(), devices=1)
    rule, reason = TEXTS[way]
    assert caught.value.rule == rule
    assert caught.value.reason.startswith(reason)
    assert caught.value.location is not None
    assert caught.value.location.file == __file__
    KEPT.clear()


def test_the_whole_text() -> None:
    number = Closed.forward.__code__.co_firstlineno + 2
    text = f"""\
error[GA104]: cannot capture `Ruled.forward`: the backward of `Closed` can not be part of the graph
  --> test_bad_input_rules.py:{number}
{number:>5} |         return x * WEIGHT
      |                ^^^^^^^^^^
  why:  it reads a tensor of shape [8] that is not among its arguments
  help: give it as an argument:  Closed.apply(x, weight)
  explain: graphaccel explain GA104"""
    model = Classifier(Ruled("closed"))
    with refused(errors.GradientRuleRefused, text, model):
        graphaccel.optimize(model, example_batch=small_batch(), devices=1)


def test_a_write_through_data_is_refused() -> None:
    with pytest.raises(errors.CaptureRefused, match="changed in place"):
        graphaccel.optimize(Classifier(Ruled("written")), example_batch=small_batch(), devices=1)
