"""Embeddings that a graph can not hold: refused, and the line that says what to do does the same."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from tests.support.untouched import plain_places


class Words(nn.Module):
    """A table of 9 words of 4 numbers, with what nn.Embedding is given besides."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, **settings)
        self.out = nn.Linear(4, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.table(tokens)), tokens)


class Directly(Words):
    """The same by a function."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.table.weight, sparse=True)
        return F.cross_entropy(self.out(rows), tokens)


TOKENS = torch.tensor([1, 2, 3, 2])
MAX_NORM = """\
error[GA102]: cannot capture `table`: this has no graph
PLACE
  why:  `max_norm` writes to the table while it is read
  help: leave max_norm out, and before each step:  torch.embedding_renorm_(table.weight.data, tokens, max_norm, 2.0)
  explain: graphaccel explain GA102"""
SPARSE = """\
error[GA102]: cannot capture WHERE: this has no graph
PLACE
  why:  `sparse=True` gives a gradient that is no dense tensor
  help: torch.nn.Embedding(..., sparse=False)  # the same gradient, for an optimizer of dense ones
  explain: graphaccel explain GA102"""


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Words(max_norm=0.5), MAX_NORM),
        (Words(sparse=True), SPARSE.replace("WHERE", "`table`")),
        (Directly(), SPARSE.replace("WHERE", "`Directly.forward`")),
    ],
    ids=["max_norm", "sparse", "function"],
)
def test_refused(model: nn.Module, text: str) -> None:
    with pytest.raises(errors.CaptureRefused) as caught:
        graphaccel.optimize(model, example_batch=TOKENS)
    assert caught.value.location is not None
    own, first = inspect.getsourcelines(type(model).forward)
    assert first <= caught.value.location.line < first + len(own)
    said = plain_places(str(caught.value)).splitlines()
    said = [line for line in said if "-->" not in line and " | " not in line]
    assert "\n".join(said) == text.replace("\nPLACE", "")


def test_the_rows_that_are_read_are_made_shorter_by_the_line_of_the_help() -> None:
    plain = Words(max_norm=0.5).double()
    ours = copy.deepcopy(plain)
    ours.table.max_norm = None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=1)
    for _ in range(3):
        torch.embedding_renorm_(ours.table.weight.data, TOKENS, 0.5, 2.0)
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(TOKENS).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-12, atol=1e-12)
