"""One rank captures for all; where it can not, each meets the reason itself."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel.compiler import captures
from graphaccel.errors import GraphMisuse, TensorBranch
from graphaccel.runtime import broadcast as share
from tests.support.gpt import GPT
from tests.support.pool import Pool, WorkerError

pytestmark = pytest.mark.multiprocess


DIFFERENT = (
    "the model of rank 1 is not that of rank 0: they differ in modules, parameters, buffers or "
    "modes"
)


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        if self.kind == "branch" and y.sum() > 0:
            y = -y
        return y.square().mean()


def _made(kind: str) -> tuple[int, str]:
    """How many captures this rank made for a step, and its error."""
    count = 0
    original = captures.capture

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    captures.capture = counting
    error = ""
    try:
        torch.manual_seed(1)
        if kind == "gpt":
            model: nn.Module = GPT()
            tokens = torch.zeros(4, 8, dtype=torch.int64)
            batch: dict[str, torch.Tensor] = {"input_ids": tokens, "labels": tokens}
        else:
            model, batch = _Net(kind), {"x": torch.ones(4, 4)}
        if kind == "differ" and torch.distributed.get_rank() == 1:
            model.layer = nn.Linear(4, 4, bias=False)
        model = graphaccel.optimize(model, devices=2, data=2)
        model(**batch).backward()
        model(**{k: v[:2] for k, v in batch.items()}).backward()
    except TensorBranch:
        error = "TensorBranch"
    except GraphMisuse as caught:
        error = caught.message().sentence
    finally:
        captures.capture = original
    return count, error


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt", [(1, ""), (0, "")]),
        ("branch", [(1, "TensorBranch"), (1, "TensorBranch")]),
        ("differ", [(0, DIFFERENT), (0, DIFFERENT)]),
    ],
)
def test_captures_made(pool: Pool, kind: str, expected: list[tuple[int, str]]) -> None:
    assert pool.run(2, _made, kind) == expected


WRITTEN = """\
error[GA407]: rank 1's weights are not rank 0's: some ranks wrote theirs alone after optimize()
  help: write them on every rank:  model.load_state_dict(torch.load(path))
  explain: graphaccel explain GA407"""


def _weights(written: bool) -> tuple[str, list[str], torch.Tensor]:
    """(the error of the first step, what was said of weights, the weights) of a model that each
    rank seeds by itself. written: rank 1 writes into its own after `optimize`."""
    said: list[str] = []
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model: nn.Module = _Net("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with patch.object(share, "progress", lambda phase, what, _: said.append(f"{phase} {what}")):
        model, optimizer = graphaccel.optimize(model, optimizer, devices=2, data=2)
    if written and rank == 1:
        with torch.no_grad():
            model.layer.bias.add_(1.0)
    error = ""
    try:
        model(torch.ones(4, 4)).backward()
        optimizer.step()
    except GraphMisuse as caught:
        error = str(caught)
    return error, said, model.layer.weight.detach().clone()


def test_weights_that_ranks_made_otherwise_are_those_of_rank_0(pool: Pool) -> None:
    (error, said, weight), other = pool.run(2, _weights, False)
    assert error == other[0] == ""
    assert said == other[1] == ["weights rank 0's, on every rank: others had rank 1"]
    assert torch.equal(weight, other[2])


def test_weights_that_one_rank_writes_after_it_are_refused(pool: Pool) -> None:
    for error, _, _ in pool.run(2, _weights, True):
        assert error == WRITTEN


def _patience(dies: bool) -> float:
    """Seconds for which the other rank waits for a capture that fails, or whose process ends."""
    seconds: list[float] = []
    new_group = torch.distributed.new_group

    def made(backend: str, timeout: timedelta) -> Any:
        seconds.append(timeout.total_seconds())
        return new_group(backend=backend, timeout=timeout)

    def capture() -> Any:
        if dies:
            os._exit(1)
        raise ValueError("the user's")

    with patch.object(torch.distributed, "new_group", made), suppress(ValueError):
        share.share_capture(False, "same", capture, lambda step: None)
    return seconds[0]


def test_a_long_capture_is_waited_for(pool: Pool) -> None:
    """However short the timeout of the run is: that is for ranks that do not answer."""
    assert min(pool.run(2, _patience, False)) > 24 * 3600


def test_a_rank_that_dies_in_its_capture_is_named(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _patience, True)
    failures = caught.value.failures
    assert failures[0].kind == "died"
    assert failures[1].kind == "RankLost"
    assert failures[1].message.splitlines()[0] == "error[GA501]: rank 1 lost rank 0"
