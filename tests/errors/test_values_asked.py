"""Forwards that make Python numbers of tensors, and keep them: none trains with an old one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH


class Layer(nn.Module):
    """Inputs x, y: [B, 8] → loss; `kept` is what it keeps."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(WIDTH, WIDTH), kept

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.layer(x)
        return F.mse_loss(out * self.keep(out.std().item()), y)

    def keep(self, value: float) -> float:
        raise NotImplementedError


class Mean(Layer):
    def keep(self, value: float) -> float:
        self.kept = 0.9 * self.kept + 0.1 * value
        return self.kept


class MeanInDict(Layer):
    def keep(self, value: float) -> float:
        self.kept["mean"] = 0.9 * self.kept["mean"] + 0.1 * value
        return self.kept["mean"]


class Count(Layer):
    def keep(self, value: float) -> float:
        self.kept += 1
        return self.kept


class Collects(Layer):
    def keep(self, value: float) -> float:
        self.kept.append(value)
        return 1.0


class Scales(Layer):
    def keep(self, value: float) -> float:
        self.last = value
        return 1.0


class Floats(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = float(self.layer.weight.std())
        return F.mse_loss(self.layer(x) * scale, y)


class Converges(Layer):
    def keep(self, value: float) -> float:
        while value > 0.1:
            value = self.layer.weight.abs().mean().item()
        return value


class Counts(Layer):
    """Asks for a count that it has changed."""

    def __init__(self, kept: Any) -> None:
        super().__init__(kept)
        self.count: Tensor
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count.add_(1)
        if self.count.item() == 1:
            x = 2 * x
        return F.mse_loss(self.layer(x), y)


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1)
    model(*torch.randn(2, 4, WIDTH)).backward()


@pytest.mark.parametrize(
    "model", [Mean(1.0), MeanInDict({"mean": 1.0}), Count(0), Collects([])], ids=lambda m: type(m)
)
def test_what_the_next_forward_reads(model: Layer) -> None:
    with pytest.raises(errors.StateFrozen, match=r"`kept.*changes in every forward") as caught:
        _step(model)
    container = isinstance(model, Collects)
    assert ("return what it collects" in str(caught.value)) is container


def test_what_the_script_reads() -> None:
    model = Scales(None)
    model.last = 0.0  # type: ignore[assignment]
    _step(model)
    with pytest.raises(errors.OutputDropped, match="`last` of the model has no value"):
        float(model.last)
    with torch.no_grad():
        model.eval()(*torch.randn(2, 4, WIDTH))
    assert float(model.last) > 0


def test_a_loop_until_a_value_is_small() -> None:
    with pytest.raises(errors.TensorBranch, match="it branches on the value of a tensor"):
        _step(Converges(None))


def test_a_number_of_a_tensor() -> None:
    with pytest.raises(errors.TensorBranch, match="it takes the value of a tensor") as caught:
        _step(Floats(None))
    assert "scale = float(self.layer.weight.std())" in str(caught.value)
    assert "leave it a tensor" in str(caught.value)


def test_a_buffer_that_is_asked_after_a_write() -> None:
    with pytest.raises(errors.TensorBranch) as caught:
        _step(Counts(None))
    assert "or make it branch-free:  x = torch.where(self.count == 0, a, b)" in str(caught.value)


LIBRARY = """
def halved(x):
    if x.max() > 3:
        x = x / 2
    return x
"""


def test_a_branch_in_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "halving.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)

    class Halves(Layer):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            halving = importlib.import_module("halving")
            return F.mse_loss(halving.halved(self.layer(x)), y)

    with pytest.raises(errors.TensorBranch) as caught:
        _step(Halves(None))
    assert "the branch is in halving.py:3: call that in the script" in str(caught.value)


class Hit(nn.Module):
    """A loop over the experts that a batch chose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), 3)
        out = torch.zeros_like(x)
        for number in chosen.sum(0).nonzero():
            (rows,) = torch.where(chosen[:, int(number)])
            out.index_add_(0, rows, self.experts[int(number)](x[rows]) * gates[rows, number, None])
        return out.square().mean()


class Weighed(Hit):
    """The same as the help says."""

    def forward(self, x: Tensor) -> Tensor:
        gates, experts = self.gate(x).softmax(-1), self.experts
        gates = gates * F.one_hot(gates.argmax(-1), 3)
        out: Any = sum(gates[:, i, None] * expert(x) for i, expert in enumerate(experts))
        return out.square().mean()


def test_a_loop_over_experts_names_what_to_type_and_that_is_the_same() -> None:
    torch.manual_seed(0)
    plain, typed = Hit().double(), Weighed().double()
    typed.load_state_dict(plain.state_dict())
    x = torch.randn(8, 4, dtype=torch.float64)
    loss = plain(x)
    loss.backward()
    graphaccel.optimize(typed, devices=1)
    typed(x).backward()
    for one, other in zip(plain.parameters(), typed.parameters(), strict=True):
        torch.testing.assert_close(
            other.grad, torch.zeros_like(other) if one.grad is None else one.grad
        )
    graphaccel.optimize(plain, devices=1)
    with pytest.raises(errors.TensorBranch) as raised:
        plain(x)
    text = str(raised.value)
    assert "for number in chosen.sum(0).nonzero():" in text
    assert "out = sum(gates[:, i, None] * expert(x) for i, expert in enumerate(experts))" in text
