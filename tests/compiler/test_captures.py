"""How often a model's Python is exported: what most of the time to the first step goes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphaccel.capture.batch import flatten_call
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import model_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


class Tokens(nn.Module):
    """Blocks over tokens; in evaluation it does something else."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(layers)
        )
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().sum() if self.training else x.abs().sum()


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    real, found = torch.export.export, []

    def noting(*args: Any, **options: Any) -> Any:
        found.append(args)
        return real(*args, **options)

    monkeypatch.setattr(torch.export, "export", noting)
    return found


def tokens(*shape: int) -> Tensor:
    return torch.arange(shape[0] * shape[1]).reshape(shape) % 32


@pytest.mark.parametrize(("layers", "training", "evaluation"), [(2, 3, 1), (12, 4, 2)])
def test_a_first_evaluation_is_exported_at_its_own_size(
    layers: int, training: int, evaluation: int, exports: list[Any]
) -> None:
    model = Tokens(layers)
    captures = Captures(model_of(model, None, None, "cpu"))
    captures.of(flatten_call((tokens(6, 10),), {}))
    assert len(exports) == training
    exports.clear()
    model.eval()
    step, _ = captures.of(flatten_call((tokens(6, 10),), {}), training=False, fixed=True)
    assert len(exports) == evaluation
    assert "aten.abs" in step.text()
    exports.clear()
    other, sizes = captures.of(flatten_call((tokens(4, 10),), {}), training=False, fixed=True)
    assert len(exports) == training
    assert set(map(str, sizes)) == {"b", "s"}
    exports.clear()
    assert captures.of(flatten_call((tokens(3, 8),), {}), training=False, fixed=True)[0] is other
    assert exports == []
