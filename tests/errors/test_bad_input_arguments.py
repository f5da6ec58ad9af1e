"""Things of another kind given to `optimize`, `plan` and `full_state_dict`: refused before anything."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import graphaccel
from graphaccel import errors
from tests.support.small import CLASSES, Classifier, small_batch, used_optimizer
from tests.support.untouched import refused


class Lazy(nn.Module):
    """A head whose width the first call tells."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


class MakesItsOwn(nn.Module):
    """A head that the first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_parameter("head", None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.head is None:
            self.head = nn.Parameter(torch.randn(CLASSES, x.shape[-1]))
        return F.cross_entropy(F.linear(x, self.head) * self.scale, y)


def _text(what: str, code: str = "GA407", why: str = "", **line: str) -> str:
    parts = [f"error[{code}]: {what}"]
    parts += [f"  why:  {why}"] if why else []
    parts += [f"  help: {text}" for text in line.values()]
    return "\n".join([*parts, f"  explain: graphaccel explain {code}"])


OPTIMIZER = {"line": "graphaccel.optimize(model, torch.optim.AdamW(model.parameters()))"}
EXAMPLE = {"line": "graphaccel.optimize(model, optimizer, example_batch=next(iter(loader)))"}
TIMEOUT = {"line": "graphaccel.optimize(model, optimizer, timeout=600)"}
LOSS = {"line": 'loss_fn=torch.nn.functional.cross_entropy, or "outside" if the script computes the loss'}  # fmt: skip
CLUSTER = {"line": "cluster=graphaccel.planner.cluster.catalogue.cluster('h100-80gb', count=8)"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"optimizer": "adam"}, _text("the optimizer is a torch.optim.Optimizer, not str", **OPTIMIZER)),
        ({"optimizer": torch.optim.SGD}, _text("the optimizer is a torch.optim.Optimizer, not type", **OPTIMIZER)),
        ({"example_batch": "x"}, _text("example_batch is what one call of the model is given, not str", **EXAMPLE)),
        ({"example_batch": DataLoader([1])}, _text("example_batch is what one call of the model is given, not DataLoader", **EXAMPLE)),
        ({"timeout": "long"}, _text("timeout is a number of seconds above 0, not 'long'", **TIMEOUT)),
        ({"timeout": -1.0}, _text("timeout is a number of seconds above 0, not -1.0", **TIMEOUT)),
        ({"loss_fn": nn.MSELoss}, _text("loss_fn is a function of the model's output and the targets, not <class 'torch.nn.modules.loss.MSELoss'>", **LOSS)),
        ({"loss_fn": (torch.arange(300),)}, _text("loss_fn is a function of the model's output and the targets, not (tensor([ 0, 1, 2, 3, ...94, 295, 296, 297, 298, 299]),)", **LOSS)),
        ({"cluster": "h100"}, _text("cluster is a graphaccel.planner.cluster.cluster.Cluster, not 'h100'", **CLUSTER)),
    ],
)  # fmt: skip
def test_other_kinds(given: dict[str, Any], text: str) -> None:
    model = Classifier()
    with refused(errors.GraphMisuse, text, model):
        graphaccel.optimize(model, **given)


@pytest.mark.parametrize(
    "run", [graphaccel.optimize, lambda m: graphaccel.plan(m, small_batch(), devices=2)]
)
def test_no_module(run: Callable[[Any], Any]) -> None:
    made = "graphaccel.optimize(Classifier(...), optimizer)"
    for model, text in (
        (Classifier, _text("the model is a torch.nn.Module, not the class Classifier", line=made)),
        (print, _text("the model is a torch.nn.Module, not builtin_function_or_method")),
    ):
        with pytest.raises(errors.GraphMisuse) as caught:
            run(model)
        assert str(caught.value) == text


def test_what_plan_is_given() -> None:
    model, batch = Classifier(), small_batch()
    for given, kind in (
        ({"devices": "2"}, errors.BadPin),
        ({"devices": 2, "optimizer": "adam"}, errors.GraphMisuse),
        ({"devices": 2, "loss_fn": "mse"}, errors.GraphMisuse),
        ({"devices": 2, "dta": 2}, errors.BadPin),
        ({"devices": 2, "device": 3}, errors.UnknownDevice),
    ):
        with pytest.raises(kind):
            graphaccel.plan(model, batch, **given)
    with pytest.raises(errors.GraphMisuse):
        graphaccel.full_state_dict(3)  # type: ignore[arg-type]


def test_parameters_without_a_shape() -> None:
    text = _text(
        "`head.weight`, which has no shape yet, is not supported",
        "GA208",
        "a lazy module makes its parameters when it is called the first time",
        line="model(batch)  # once, before the optimizer is made and optimize() is called",
    )
    model, batch = Lazy(), small_batch()
    for run in (
        lambda: graphaccel.optimize(model, example_batch=batch),
        lambda: graphaccel.plan(model, batch, devices=2),
    ):
        with pytest.raises(errors.Unsupported) as caught:
            run()
        assert str(caught.value) == text
    model(*batch)
    graphaccel.optimize(model, used_optimizer(model), example_batch=batch, devices=1)
    model(*batch).backward()
    assert model.head.weight.grad is not None


def test_a_parameter_that_the_first_forward_makes() -> None:
    text = _text(
        "`head`, which the first forward makes, is not supported",
        "GA208",
        "the plan places, and the optimizer steps, what the model has before it",
        line="model(batch)  # once, before the optimizer is made and optimize() is called",
    )
    model, batch = MakesItsOwn(), small_batch()
    with pytest.raises(errors.Unsupported) as caught:
        graphaccel.optimize(model, example_batch=batch)
    assert str(caught.value) == text
    assert model.head is None
    model(*batch)
    graphaccel.optimize(model, used_optimizer(model), example_batch=batch, devices=1)
    model(*batch).backward()
    assert model.head.grad is not None


def test_a_compiled_model() -> None:
    text = _text(
        "the model is compiled by torch.compile, which would run instead of a plan",
        line="graphaccel.optimize(model, optimizer, compile='inductor')  # of the model before torch.compile",
    )
    inplace = Classifier()
    inplace.compile(backend="eager")
    for model in (inplace, torch.compile(Classifier(), backend="eager")):
        with pytest.raises(errors.GraphMisuse) as caught:
            graphaccel.optimize(model)
        assert str(caught.value) == text


def test_a_scripted_module() -> None:
    model = Classifier()
    model.inner = torch.jit.trace(model.inner, small_batch()[0])
    text = _text(
        "a TorchScript module (`inner`) is not supported",
        "GA208",
        "the graph is captured from the model's Python code, which it has no more",
        line="build it from its Python class, and load its state_dict()",
    )
    with pytest.raises(errors.Unsupported) as caught:
        graphaccel.optimize(model)
    assert str(caught.value) == text


def test_a_first_batch_without_examples() -> None:
    model, batch = Classifier(), small_batch(rows=0)
    text = _text(
        "the first batch has no examples: `args[0]` has the shape [0, 8]",
        line="graphaccel.optimize(model, optimizer, example_batch=batch)  # one that has",
    )
    with refused(errors.GraphMisuse, text, model):
        graphaccel.optimize(model, example_batch=batch)
    graphaccel.optimize(model)
    with refused(errors.GraphMisuse, text, model):
        model(*batch)
    model(*small_batch()).backward()
    assert model.out.weight.grad is not None


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, as scripts write it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in inner.param_groups]

    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for parameter, mean in zip(group["params"], slow, strict=True):
                mean.lerp_(parameter.data, 0.5)
                parameter.data.copy_(mean)


def test_an_optimizer_without_its_base() -> None:
    model = Classifier()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    text = """\
error[GA407]: the optimizer's class Lookahead does not call Optimizer.__init__, so that its steps can not be followed
  help: give the optimizer in it, and wrap that afterwards:  model, optimizer = graphaccel.optimize(model, optimizer); optimizer = Lookahead(optimizer)
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model):
        graphaccel.optimize(model, Lookahead(inner))


def test_its_help_works() -> None:
    weights = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if planned:
            model, optimizer = graphaccel.optimize(model, optimizer, devices=1)
        around = Lookahead(optimizer)
        for _ in range(2):
            model(*small_batch()).backward()
            around.step()
            model.zero_grad()
        weights.append(model.out.weight.detach().clone())
    torch.testing.assert_close(*weights)
