"""Forwards that ask for what is outside of the process: class and full text (GA106)."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH
from tests.support.untouched import refused

FLAG = Path("flag-that-is-not-there")


class Layer(nn.Module):
    """Inputs x, y: [B, 8] → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class AsksByName(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = 2 if os.path.exists(FLAG) else 1
        return F.mse_loss(self.layer(x) * scale, y)


class AsksByPath(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = 2 if FLAG.is_file() else 1
        return F.mse_loss(self.layer(x) * scale, y)


class AsksAFolder(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = 1 + len(os.listdir())
        return F.mse_loss(self.layer(x) * scale, y)


class Runs(Layer):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = float(subprocess.check_output(["echo", "2"]))
        return F.mse_loss(self.layer(x) * scale, y)


_FILES = "ask in the script, before each step, and read that in the forward:  model.found = os.path.exists(path)"
_RUNS = "ask in the script, before each step, and read that in the forward:  model.answer = subprocess.check_output(command)"


@pytest.mark.parametrize(
    ("kind", "what", "line"),
    [
        (AsksByName, "asks the file system", _FILES),
        (AsksByPath, "asks the file system", _FILES),
        (AsksAFolder, "asks the file system", _FILES),
        (Runs, "asks another process", _RUNS),
    ],
)
def test_text(kind: type[nn.Module], what: str, line: str) -> None:
    number = kind.forward.__code__.co_firstlineno + 1
    code = Path(__file__).read_text().splitlines()[number - 1].strip()
    text = f"""\
error[GA106]: `{kind.__name__}.forward` {what}
  --> test_forward_asks.py:{number}
{number:>5} |         {code}
      |         {"^" * len(code)} a graph would keep the answer that it got at capture
  why:  the script's own model does not run: its graph does, and that knows no Python
  help: {line}
  explain: graphaccel explain GA106"""
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(errors.StateFrozen, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=tuple(torch.randn(2, 4, WIDTH)))
