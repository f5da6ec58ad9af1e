"""Gradient rules that are Python, in a captured step, against eager mode in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.export.python_function import PythonFunction, python_function
from graphaccel.capture.stepgraph import capture
from tests.support.steps import WIDTH, assert_as_eager, batch_of


class Reverse(Function):
    """The identity, whose gradient has the other sign and a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.factor * gradient, None


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Pair(Function):
    """Two results and a count; one has no gradient. Its backward asks who needs one."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, rows: int, scale: float = 2.0) -> Any:
        ordered, places = (x @ weight.t()).sort(-1)
        return ordered * (scale / rows), places, rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, rows, scale = inputs
        _, places, _ = output
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(x, weight, places)
        ctx.factor = scale / rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        x, weight, places = ctx.saved_tensors
        straight = torch.zeros_like(gradient).scatter(-1, places, gradient) * ctx.factor
        own = straight @ weight if ctx.needs_input_grad[0] else None
        return own, straight.t() @ x if ctx.needs_input_grad[1] else None, None, None


class Halves(Function):
    """Results of which one is not used, and an argument that is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, mode: str) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.mode = mode
        return x * 2, x * torch.tensor(3.0, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        half = torch.tensor(0.5, dtype=torch.float64)
        parts = [g * half for g in (first, second) if g is not None]
        return sum(parts) if ctx.mode == "sum" else None, None, None


reverse = Reverse.apply


class Rules(nn.Module):
    """All of them, some twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = StraightThrough.apply(self.first(x)) + reverse(self.first(y), 0.5)
        rows, places, count = Pair.apply(hidden, self.second.weight, x.shape[0])
        fixed, _, _ = Pair.apply(x, self.second.weight, rows=count, scale=3.0)
        doubled, _ = Halves.apply(Reverse.apply(rows + fixed, 2.0), None, "sum")
        with torch.no_grad():
            known = StraightThrough.apply(hidden)
        out = self.second(doubled) + places * known
        return F.mse_loss(out, y)


def rules_in(step: Any) -> list[str]:
    nodes = step.forward.graph.graph.nodes
    return [n.target.name for n in nodes if isinstance(n.target, PythonFunction)]


def test_functions_of_every_kind() -> None:
    step = assert_as_eager(Rules)
    assert rules_in(step) == ["StraightThrough", "Reverse", "Pair", "Pair", "Reverse", "Halves"]
    assert not any(isinstance(n.target, PythonFunction) for n in step.graph.graph.nodes)
    assert all(n.op != "get_attr" for n in step.graph.graph.nodes)
    assert "Reverse(%" in str([str(n.target) + "(%" for n in step.forward.graph.graph.nodes])
    assert step.sizes  # also where a Function is given a size: captures of two sizes are alike
    assert python_function() is python_function()


class Hooked(nn.Module):
    """Hooks on activations: before and after other uses, two on one, on a view, one taken off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        before = hidden.tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g * 0.1)
            hidden.register_hook(lambda g: g.clamp(-0.01, 0.01))
        part = hidden[:, :2]
        part.register_hook(lambda g: g + 0.05)
        removed = hidden.register_hook(lambda g: g * 100)
        removed.remove()
        scale = 0.5
        after = self.second(hidden)
        after.register_hook(lambda g, scale=scale: g * scale)
        after.add_(1)
        out = before + after + part.sum(-1, keepdim=True)
        return F.mse_loss(out, y)


def test_hooks_on_activations() -> None:
    step = assert_as_eager(Hooked)
    assert len(rules_in(step)) == 4
    assert step.sizes


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rows = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Without an input that has a gradient, reentrant checkpoints have none for their weights.
        lost = checkpoint(self.c, x, use_reentrant=True)
        x = self.a(x) + lost
        x = checkpoint(lambda h: self.b(h).tanh(), x, use_reentrant=True)
        x = checkpoint(self.b, x, use_reentrant=False)
        x = checkpoint_sequential(self.rows, 2, x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            x = self.a(x).tanh()
        return F.mse_loss(x, y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_are_their_functions() -> None:
    step = assert_as_eager(Checkpointed)
    assert rules_in(step) == []


class Data(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        scaled = hidden * hidden.data.sigmoid() + hidden @ self.second.weight.data
        return F.mse_loss(self.second(scaled), y)


def test_data_of_a_tensor_is_a_constant_to_gradients() -> None:
    assert_as_eager(Data)


def test_torch_is_itself_again_afterwards() -> None:
    x, y = batch_of()
    capture(Hooked().double(), flatten_call((x, y), {}), symbolic=False)
    tensor = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        out = (tensor * tensor).sum()
    out.backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [4, 4]
    assert Reverse.apply(tensor, 1.0).grad_fn.name() == "ReverseBackward"


def test_one_rule_is_another_where_it_does_the_same() -> None:
    def hook(factor: float) -> PythonFunction:
        return PythonFunction("hook", lambda g: g * factor)

    assert hook(2.0) == hook(2.0)
    assert hook(2.0) != hook(3.0)
    assert PythonFunction("f", Reverse) == PythonFunction("f", Reverse)
    assert PythonFunction("f", Reverse) != PythonFunction("f", StraightThrough)
    held: list[Any] = [object(), object()]
    a, b = (PythonFunction("f", Reverse, ((0, h),)) for h in held)
    assert a != b
    assert a == PythonFunction("f", Reverse, ((0, held[0]),))
