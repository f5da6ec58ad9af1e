"""Values in a call that are no tensors: a capture serves the calls that have the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import model_of
from graphaccel.errors import GraphMisuse


class Flags(nn.Module):
    """Inputs [B, 4]; returns a loss, or what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, kind: str = "mean", return_loss: bool = True
    ) -> Tensor:
        y = self.layer(x).square()
        return y.sum() if kind == "sum" else y.mean()


def _batch(rows: int, kind: str) -> Batch:
    return flatten_call((torch.ones(rows, 4), None), {"kind": kind, "return_loss": True})


def test_one_capture_for_each_set_of_values() -> None:
    captures = Captures(model_of(Flags(), None, None, "cpu"))
    mean, _ = captures.of(_batch(8, "mean"))
    assert captures.knows(_batch(8, "mean"))
    assert captures.knows(_batch(12, "mean"))
    assert captures.of(_batch(12, "mean"))[0] is mean
    assert not captures.knows(_batch(8, "sum"))
    total, _ = captures.of(_batch(8, "sum"))
    assert total is not mean
    assert captures.of(_batch(4, "mean"))[0] is mean

    other = Captures(model_of(Flags(), None, None, "cpu"))
    other.keep(_batch(8, "mean"), mean)  # as ranks do with what one of them captured
    assert other.of(_batch(8, "mean"))[0] is mean


def test_a_batch_without_examples_is_refused_later_too() -> None:
    captures = Captures(model_of(Flags(), None, None, "cpu"))
    captures.of(_batch(8, "mean"))
    with pytest.raises(GraphMisuse) as caught:
        captures.of(_batch(0, "mean"))
    assert (
        str(caught.value)
        == """\
error[GA407]: the batch has no examples: `args[0]` has the shape [0, 4]
  help: leave it out:  DataLoader(dataset, drop_last=True)
  explain: graphaccel explain GA407"""
    )
