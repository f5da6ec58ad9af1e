"""What models are called with: objects of any class that hold tensors, and what is refused."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import graphaccel
from graphaccel import errors
from tests.support.untouched import refused


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    scale: float = 1.0


class Slotted:
    __slots__ = ("inner", "x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.inner = x, y, Pair(x, y)

    @property
    def scale(self) -> float:
        return self.inner.scale * float(len(self.inner.x) > 0)


class Mapped(UserDict[str, Any]):
    """As a tokenizer returns it."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Settings:
    """No tensors."""

    alpha = 1.0


class Reads(nn.Module):
    """`forward(given)`: an object with x and y, [B, 4] each, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, given: Any, more: Any = None) -> Tensor:
        return given.scale * F.mse_loss(self.layer(given.x), given.y)


MAKE = {
    "dataclass": lambda x, y, scale: Pair(x, y, scale),
    "slots": lambda x, y, scale: Slotted(x, y),
    "namespace": lambda x, y, scale: SimpleNamespace(x=x, y=y, scale=scale),
    "mapping": lambda x, y, scale: Mapped(x=x, y=y, scale=scale),
}


def _trained(make: Any, *, planned: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = Reads().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if planned:
        graphaccel.optimize(model, optimizer, devices=1)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        loss = model(make(*torch.randn(2, 8, 4).double(), 1.0 + number // 2))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [*model.parameters()]


@pytest.mark.parametrize("kind", list(MAKE))
def test_an_object_that_holds_tensors(kind: str) -> None:
    losses, weights = _trained(MAKE[kind], planned=False)
    planned = _trained(MAKE[kind], planned=True)
    assert planned[0] == pytest.approx(losses, rel=1e-12)
    for a, b in zip(weights, planned[1], strict=True):
        assert (a - b).abs().max() <= 1e-12


OBJECTS = {
    "ndarray": (np.ones((4, 4)), "pass a tensor:  model(torch.from_numpy(x))"),
    "Settings": (Settings(), "pass what forward reads of it:  model(x, alpha=settings.alpha)"),
}


@pytest.mark.parametrize("name", list(OBJECTS))
def test_an_input_without_tensors(name: str) -> None:
    given, line = OBJECTS[name]
    text = f"""\
error[GA102]: cannot capture `Reads.forward`: this has no graph
  why:  an input is an object of class {name}, in which no tensor is found
  help: {line}
  explain: graphaccel explain GA102"""
    model = Reads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = SimpleNamespace(x=torch.randn(8, 4), y=torch.randn(8, 4), scale=1.0)
    with refused(errors.CaptureRefused, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=(pair, given))


DENSE = {
    "sparse (torch.sparse_coo)": (torch.eye(4).to_sparse(), "x.to_dense()"),
    "nested": (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "torch.nested.to_padded_tensor(x, 0.0)",
    ),
}


@pytest.mark.parametrize("kind", list(DENSE))
def test_an_input_that_is_not_dense(kind: str) -> None:
    given, dense = DENSE[kind]
    text = f"""\
error[GA208]: the input `args[0].x`, a {kind} tensor, is not supported
  why:  the parts of a plan are cut along the dims of dense tensors
  help: pass it dense, from outside of the model:  {dense}
  explain: graphaccel explain GA208"""
    model = Reads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1)
    with refused(errors.Unsupported, text, model, optimizer):
        model(SimpleNamespace(x=given, y=torch.randn(4, 4), scale=1.0))


class Packs(nn.Module):
    """`forward(x, lengths)`: [B, T, 4], [B] → mean over outputs and last states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, (h, _) = self.rnn(packed)
        outputs, _ = pad_packed_sequence(outputs, batch_first=True)
        return outputs.pow(2).sum() + h[-1].sum()


class Given(Packs):
    """`forward(packed)`: the sequences are packed by the script."""

    def forward(self, packed: Any) -> Tensor:  # type: ignore[override]
        return self.rnn(packed)[1][0].sum()


class Padded(Packs):
    """As the help line says it."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        # fmt: off
        outputs, _ = self.rnn(x); inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]; outputs = outputs * inside.unsqueeze(-1); last = outputs[torch.arange(len(x), device=x.device), lengths - 1]  # noqa: E501, E702
        # fmt: on
        return outputs.pow(2).sum() + last.sum()


PACKED = """\
  why:  how a packed sequence is cut depends on the lengths, which are data
  help: for one direction, run it on the padded batch:  outputs, _ = self.rnn(x); inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]; outputs = outputs * inside.unsqueeze(-1); last = outputs[torch.arange(len(x), device=x.device), lengths - 1]
  explain: graphaccel explain GA102"""  # noqa: E501


@pytest.mark.parametrize("by_script", [False, True])
def test_packed_sequences(by_script: bool) -> None:
    x, lengths = torch.randn(4, 5, 4), torch.tensor([5, 3, 2, 4])
    model = Given() if by_script else Packs()
    batch: Any = (x, lengths)
    if by_script:
        batch = (pack_padded_sequence(*batch, batch_first=True, enforce_sorted=False),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(errors.CaptureRefused) as caught:
        graphaccel.optimize(model, optimizer, devices=1, example_batch=batch)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("error[GA102]: cannot capture `")
    assert "self.rnn(packed)" in lines[2]
    assert "\n".join(lines[-3:]) == PACKED


def test_the_padded_batch_instead() -> None:
    x, lengths = torch.randn(4, 5, 4).double(), torch.tensor([5, 3, 2, 4])
    plain, ours = Packs().double(), Padded().double()
    ours.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    graphaccel.optimize(ours, optimizer, devices=1)
    losses = plain(x, lengths), ours(x, lengths)
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-12
