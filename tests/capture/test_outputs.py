"""What models return: tensors in objects of any class are outputs, and the objects come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from graphaccel.capture.export.outputs import flatten_output, output_names
from graphaccel.compat.torch import pytree
from tests.support.untouched import refused


@dataclass(frozen=True)
class Output:
    logits: Tensor
    loss: Tensor | None = None
    note: str = ""


@dataclass(slots=True)
class Slotted:
    logits: Tensor
    inner: Output


class Plain:
    def __init__(self, logits: Tensor, loss: Tensor) -> None:
        self.logits, self.loss = logits, loss


class Named(OrderedDict[str, Any]):
    """A dict of a class that pytree does not know."""


class Computed:
    """Its loss is another tensor each time."""

    def __init__(self, logits: Tensor, loss: Tensor) -> None:
        self.logits, self._half = logits, loss / 2

    @property
    def loss(self) -> Tensor:
        return self._half * 2


class Opaque:
    __slots__ = ("__logits",)

    def __init__(self, logits: Tensor) -> None:
        self.__logits = logits


class Returns(nn.Module):
    """`forward(x, y)`: [B, 4] twice → what `make` makes of logits [B, 4] and loss."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.layer(x)
        return self.make(logits, F.mse_loss(logits, y))


WITH_LOSS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": lambda h, loss: Output(h, loss, "kept"),
    "plain": Plain,
    "namespace": lambda h, loss: SimpleNamespace(loss=loss, logits=h),
    "dict": lambda h, loss: Named(loss=loss, logits=h),
}
WITHOUT: dict[str, tuple[Any, Any]] = {
    "dataclass": (lambda h, _: Output(h), lambda out, y: F.mse_loss(out.logits, y)),
    "slots": (
        lambda h, _: Slotted(h, Output(h * 2)),
        lambda out, y: F.mse_loss(out.logits + out.inner.logits, y),
    ),
    "distribution": (
        lambda h, _: Normal(h, h.exp(), validate_args=False),
        lambda out, y: -out.log_prob(y).mean(),
    ),
    "distribution that checks": (
        lambda h, _: Independent(Normal(h, h.exp(), validate_args=True), 1),
        lambda out, y: -out.log_prob(y).mean() - 0.1 * out.entropy().mean(),
    ),
    "choice": (
        lambda h, _: Categorical(logits=h),
        lambda out, y: -out.log_prob(y.argmax(1)).mean() - 0.1 * out.entropy().mean(),
    ),
}


def _trained(
    make: Any, loss_of: Callable[[Any, Tensor], Tensor], planned: bool
) -> tuple[list[Any], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Returns(make).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 8, 4).double()
    if planned:
        graphaccel.optimize(model, optimizer, devices=1, outputs="all")
    made = []
    for _ in range(2):
        optimizer.zero_grad()
        made.append(model(x, y))
        loss_of(made[-1], y).backward()
        optimizer.step()
    return made, model.state_dict()


def _compare(make: Any, loss_of: Callable[[Any, Tensor], Tensor]) -> list[Any]:
    want, state = _trained(make, loss_of, False)
    got, found = _trained(make, loss_of, True)
    assert [type(x) for x in got] == [type(x) for x in want]
    for ours, theirs in zip(got, want, strict=True):
        pairs = zip(flatten_output(ours)[0], flatten_output(theirs)[0], strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b) if isinstance(b, Tensor) else None
            assert isinstance(b, Tensor) or a == b
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    return got


@pytest.mark.parametrize("name", WITH_LOSS)
def test_objects_with_a_loss(name: str) -> None:
    made = _compare(
        WITH_LOSS[name], lambda out, _: out["loss"] if isinstance(out, dict) else out.loss
    )
    assert name != "dataclass" or made[0].note == "kept"


@pytest.mark.parametrize("name", WITHOUT)
def test_objects_whose_loss_the_script_computes(name: str) -> None:
    made = _compare(*WITHOUT[name])
    assert name != "distribution" or isinstance(made[0], Distribution)


def test_an_output_that_is_not_kept_is_named() -> None:
    names = {}
    for make in WITH_LOSS.values():
        leaves, spec = flatten_output(make(torch.ones(2), torch.ones(())))
        numbered = pytree.tree_unflatten(list(range(len(leaves))), spec)
        names |= {leaves[i].dim(): n for i, n in output_names(numbered).items() if n != "note"}
        assert set(names.values()) == {"logits", "loss"}


def test_an_object_that_holds_itself_ends() -> None:
    ring = SimpleNamespace(x=torch.ones(2))
    ring.ring = ring
    leaves, spec = flatten_output([ring])
    assert [leaf is ring for leaf in leaves] == [False, True]
    assert isinstance(pytree.tree_unflatten(leaves, spec)[0], SimpleNamespace)


@pytest.mark.parametrize(
    ("make", "kind", "what"),
    [(Computed, "Computed", "the loss"), (lambda h, _: Opaque(h), "Opaque", "a tensor")],
)
def test_what_is_not_seen_is_refused(make: Any, kind: str, what: str) -> None:
    text = f"""\
error[GA102]: cannot capture `Returns.forward`: this has no graph
  why:  it returns an object of class {kind}, in which {what} is not found among the attributes
  help: return a tensor, a tuple, a dict or a dataclass:  return {{'loss': loss, 'logits': logits}}
  explain: graphaccel explain GA102"""
    model = Returns(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(errors.CaptureRefused, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=tuple(torch.randn(2, 8, 4)))
