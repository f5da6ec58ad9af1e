"""Gradient rules that are Python, in what passes and other captures make of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import graphaccel
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.export.python_function import PythonFunction
from graphaccel.capture.stepgraph import capture
from graphaccel.compiler.model import without_data
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from tests.support.steps import ROWS, WIDTH, assert_as_eager, batch_of


class Scaled(Function):
    """Multiplies; its backward doubles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * gradient * weight, 2 * (gradient * x).sum(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Scaled.apply(torch.tanh(self.linear(x)), self.scale)
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g * 0.9)
        return x + hidden


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def test_in_repeated_layers() -> None:
    step = assert_as_eager(lambda: Stack(8), steps=2)
    assert step.repeats is not None
    nodes = [n for n in step.forward.graph.graph.nodes if isinstance(n.target, PythonFunction)]
    assert len(nodes) == 16


def test_evaluation_has_no_backward_of_it() -> None:
    torch.manual_seed(0)
    model = Stack(2).double()
    wanted = model.eval()(*batch_of()).item()
    graphaccel.optimize(model, example_batch=batch_of(), devices=1, check="off")
    with torch.no_grad():
        assert model.eval()(*batch_of()).item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_in_low_precision_it_computes_as_captured(precision: str) -> None:
    model = without_data(Stack(2))
    with next(model.parameters()).fake_mode:
        x, y = torch.empty(2, ROWS, WIDTH)
    step = capture(model, flatten_call((x, y), {}), symbolic=False)
    made = lower_precision(step, Plan(1, precision=PRECISIONS[precision]))
    linears = 0
    for node in made.forward.graph.graph.nodes:
        if getattr(node.target, "name", "") == "Scaled":
            assert {n.meta["val"].dtype for n in node.all_input_nodes} == {torch.float32}
        if node.target is torch.ops.aten.linear.default:
            linears += node.meta["val"].dtype == torch.bfloat16
    assert linears == 2


def test_a_step_in_bf16_is_near_eager() -> None:
    losses = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Stack(2)
        x, y = (t.float() for t in batch_of())
        if planned:
            graphaccel.optimize(model, devices=1, precision="bf16")
        model(x, y).backward()
        losses.append(model.layers[0].linear.weight.grad)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.1, atol=0.01)
