"""A forward that prints, logs and writes to a file trains; its steps do none of it, and say so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphaccel
from tests.guards.test_guards import Net

LOG = logging.getLogger("tests.guards.effects")


def _train(use: Any, *, optimized: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = Net(use).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if optimized:
        graphaccel.optimize(model, optimizer, devices=1, check="off")
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4, dtype=torch.float64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_prints_logs_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"

    def use(_: Any, h: Tensor) -> Tensor:
        with path.open("a") as file:
            file.write(f"{tuple(h.shape)}\n")
        print("mean", h.mean().item())
        LOG.info("shape %s", h.shape)
        return h * 2 if LOG.isEnabledFor(logging.INFO) else h

    first = use.__code__.co_firstlineno
    with caplog.at_level(logging.INFO, LOG.name):
        plain = _train(use, optimized=False)
        assert len(path.read_text().splitlines()) == len(caplog.records) == 3
        capsys.readouterr()
        assert _train(use, optimized=True) == pytest.approx(plain, rel=1e-12)
    printed = capsys.readouterr()
    assert "mean" not in printed.out
    assert len(path.read_text().splitlines()) == len(caplog.records) == 3
    for line, does in ((1, "writes to a file"), (3, "prints"), (4, "logs")):
        said = f"Net.forward {does} (test_effects.py:{first + line}): the graph of a step does not"
        assert printed.err.count(said) == 1


def test_a_level_that_the_result_depends_on_is_noticed() -> None:
    def use(_: Any, h: Tensor) -> Tensor:
        return h * 2 if LOG.isEnabledFor(logging.INFO) else h

    torch.manual_seed(0)
    model: Any = Net(use)
    x, losses = torch.ones(2, 4), []
    graphaccel.optimize(model, devices=1)
    for level in (logging.WARNING, logging.INFO):
        LOG.setLevel(level)
        losses.append(model(x).item())
        with torch.no_grad():
            assert model.eval()(x).item() == pytest.approx(losses[-1], rel=1e-6)
        model.train()
    LOG.setLevel(logging.NOTSET)
    assert losses[0] != losses[1]
