"""Forwards that read what no graph has, or run operators that no plan knows: class and full text."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH
from tests.support.untouched import refused


class Layer(nn.Module):
    """Inputs x, y: [B, 8] → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))


class ReadsGrad(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = self.layer.weight.grad
        loss = F.mse_loss(self.layer(x), y)
        return loss if before is None else loss + before.abs().sum()


class ReadsVersion(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        written = self.layer.weight._version
        return F.mse_loss(self.layer(x), y) * (2 if written > 1 else 1)


class Writes(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        accumulate(self.total, x)
        return F.mse_loss(self.layer(x) + self.total, y)


class Chooses(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = torch.cond(x.sum() > 0, torch.tanh, torch.sin, (self.layer(x),))
        return F.mse_loss(out, y)


@torch.library.custom_op("graphaccel_test_reads::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x.sum(0))


@pytest.mark.parametrize(
    ("kind", "offset", "code", "shown", "title", "why", "line"),
    [
        (
            ReadsGrad, 1, "before = self.layer.weight.grad", "self.layer.weight.grad",
            "GA104]: cannot capture `ReadsGrad.forward`: a read of `.grad` of a parameter can not be part of the graph",
            "the graph has no input for the gradients of earlier steps",
            "pass its values to the model:  model(x, gradient)",
        ),
        (
            ReadsVersion, 1, "written = self.layer.weight._version", "self.layer.weight._version",
            "GA104]: cannot capture `ReadsVersion.forward`: a read of `_version` of a tensor can not be part of the graph",
            "it counts writes, which is no value of a graph",
            "count in the script, and read that in the forward:  model.version += 1",
        ),
        (
            Writes, 1, "accumulate(self.total, x)", "accumulate(self.total, x)",
            "GA102]: cannot capture `Writes.forward`: this has no graph",
            "`graphaccel_test_reads::accumulate` writes to its arguments",
            "let the op return the new value, and write that:  self.buffer.copy_(op(self.buffer, x))",
        ),
        (
            Chooses, 1, "out = torch.cond(x.sum() > 0, torch.tanh, torch.sin, (self.layer(x),))",
            "torch.cond(x.sum() > 0, torch.tanh, torch.sin, (self.layer(x),))",
            "GA102]: cannot capture `Chooses.forward`: this has no graph",
            "`torch.cond` runs graphs of its own, which no plan splits",
            "compute both, and choose:  x = torch.where(condition, a, b)",
        ),
    ],
)  # fmt: skip
def test_text(
    kind: type[nn.Module], offset: int, code: str, shown: str, title: str, why: str, line: str
) -> None:
    number = kind.forward.__code__.co_firstlineno + offset
    before = code[: code.index(shown)]
    text = f"""\
error[{title}
  --> test_forward_reads.py:{number}
{number:>5} |         {code}
      |         {" " * len(before)}{"^" * len(shown)}
  why:  {why}
  help: {line}
  explain: graphaccel explain {title[:5]}"""
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = errors.GradientRuleRefused if "GA104" in title else errors.CaptureRefused
    with refused(error, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=tuple(torch.randn(2, 4, WIDTH)))


class Cycles(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 2.0])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x) * next(self.scales), y)


def test_an_iterator() -> None:
    number = Cycles.forward.__code__.co_firstlineno + 1
    code = "return F.mse_loss(self.layer(x) * next(self.scales), y)"
    text = f"""\
error[GA106]: `scales` is an iterator (cycle), which the forward reads
  --> test_forward_reads.py:{number}
{number:>5} |         {code}
      |         {"^" * len(code)} the forward reads it
  why:  a graph would keep the value that it gave at capture
  help: take the value in the script, before each step:  model.value = next(iterator)
  explain: graphaccel explain GA106"""
    model = Cycles()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(errors.StateFrozen, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=tuple(torch.randn(2, 4, WIDTH)))
