"""A loss outside of the graph used in a way that can not be kept: class, full text, no change."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors
from tests.support.heads import Heads, heads, rows
from tests.support.small import Classifier, WithLogits, small_batch
from tests.support.untouched import plain_places, refused

FP16 = """\
error[GA202]: precision='fp16' can not be planned
  why:  fp16 scales the loss before it is differentiated, and skips steps that overflow; the loss is outside of the graph, and loss_fn= puts it inside
  help: use one of:  precision='bf16'  precision='fp32'
  explain: graphaccel explain GA202"""
SHARDED = """\
error[GA202]: {name}=2 can not be planned
  why:  with a loss outside of the graph only the batch is split; loss_fn= puts it inside
  help: use one of:  {name}={whole}
  explain: graphaccel explain GA202"""
LOSS_FN = """\
error[GA407]: loss_fn is a function of the model's output and the targets, not 'cross_entropy'
  help: loss_fn=torch.nn.functional.cross_entropy, or "outside" if the script computes the loss
  explain: graphaccel explain GA407"""
INPUT = """\
error[GA208]: a gradient of the input `args[0]` where the loss is part of the graph is not supported
  why:  gradients are computed when the model is called, those of parameters only
  help: let the script compute the loss:  graphaccel.optimize(model, optimizer, loss_fn='outside')
  explain: graphaccel explain GA208"""
BESIDE = """\
error[GA407]: the script's loss depends on output `logits`, and the step differentiates what looks like the model's own loss only
  help: let the script compute the whole loss:  graphaccel.optimize(model, optimizer, loss_fn='outside')
  explain: graphaccel explain GA407"""
CHANGED = """\
error[GA407]: parameter `a.weight` was changed in place between the forward that read it and its backward
  help: call loss.backward() before optimizer.step(), and make a copy of what is changed:  x = x.clone()
  explain: graphaccel explain GA407"""
SECOND_ORDER = """\
error[GA402]: the model's outputs can be differentiated to first order only
  why:  its backward is a graph made before, which has no derivative of its own
  help: leave create_graph=True out
  help: or compute the term that needs it with a model that runs under no plan
  explain: graphaccel explain GA402"""
TWICE = """\
error[GA402]: the outputs of one call of the model were differentiated twice
  why:  what its backward reads was freed by the first
  help: keep it:  loss.backward(retain_graph=True)
  help: or add losses before backward:  (loss_a + loss_b).backward()
  explain: graphaccel explain GA402"""
WHOLE = """\
error[GA207]: the batch can not be split over the data axis: aten.mm.default in the model needs the whole batch
  --> test_outside.py:{line}
  {line} |         return h @ h.t()
      |         ^^^^^^^^^^^^^^^^
  why:  it combines different examples of a batch with each other
  help: give the loss to optimize, where it may mix examples:  loss_fn=loss_fn
  help: or run on one device:  devices=1
  explain: graphaccel explain GA207"""


def test_half_precision() -> None:
    model = heads()
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(errors.BadPin, FP16, model, optimizer):
        graphaccel.optimize(
            model, optimizer, example_batch=rows(), loss_fn="outside", precision="fp16"
        )


@pytest.mark.parametrize(("name", "whole"), [("tensor", 1), ("zero", 0)])
def test_sharded_parameters(name: str, whole: int) -> None:
    pins = {name: 2}
    with pytest.raises(errors.BadPin) as caught:
        graphaccel.plan(heads(), rows(), devices=2, loss_fn="outside", **pins)
    assert str(caught.value) == SHARDED.format(name=name, whole=whole)


def test_a_loss_function_that_is_none() -> None:
    model = heads()
    with refused(errors.GraphMisuse, LOSS_FN, model):
        graphaccel.optimize(model, loss_fn="cross_entropy")  # type: ignore[arg-type]


def test_a_gradient_of_the_input_beside_a_loss() -> None:
    model, (x, y) = Classifier(), small_batch()
    graphaccel.optimize(model)
    with refused(errors.Unsupported, INPUT, model):
        model(x.requires_grad_(), y)


def test_a_loss_of_outputs_beside_the_models_own() -> None:
    model, batch = WithLogits(), small_batch()
    graphaccel.optimize(model, outputs="all")
    output = model(*batch)
    loss = output["loss"] + output["logits"].square().mean()
    with refused(errors.GraphMisuse, BESIDE, model):
        loss.backward()
    model(*batch)["loss"].backward()
    assert model.out.weight.grad is not None


def test_a_step_between_forward_and_backward() -> None:
    model: Heads = graphaccel.optimize(heads(), loss_fn="outside")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = model(rows())["a"].sum()
    model(rows())["a"].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with refused(errors.GraphMisuse, CHANGED, model, optimizer):
        late.backward()


def test_a_gradient_of_gradients() -> None:
    model: Heads = graphaccel.optimize(heads(), loss_fn="outside")  # type: ignore[assignment]
    loss = model(rows())["a"].square().sum()
    with refused(errors.RetainGraph, SECOND_ORDER, model):
        torch.autograd.grad(loss, [model.a.weight], create_graph=True)


def test_a_second_loss_after_the_backward_of_the_first() -> None:
    model: Heads = graphaccel.optimize(heads(), loss_fn="outside")  # type: ignore[assignment]
    outputs = model(rows())
    first, second = outputs["a"].sum(), outputs["rest"][0].sum()
    first.backward()
    with refused(errors.RetainGraph, TWICE, model):
        second.backward()


class Similar(nn.Module):
    """x [B, 8] → [B, B]: each example with each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return h @ h.t()


def test_outputs_that_mix_examples() -> None:
    model = Similar()
    with pytest.raises(errors.SplitRefused) as caught:
        graphaccel.plan(model, torch.zeros(8, 8), devices=2)
    line = Similar.forward.__code__.co_firstlineno + 2
    assert plain_places(str(caught.value)) == WHOLE.format(line=line)
    assert graphaccel.plan(model, torch.zeros(8, 8), devices=1).data == 1
