"""Batches of many lengths on two processes: few captures, and programs that are made anew."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch

import graphaccel
from tests.compiler.test_ignored_rows import Tagger, shifted
from tests.compiler.test_variants import _of_length
from tests.support.inside import captures_in, executors_in
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

LENGTHS = (8, 5, 8, 9, 5, 8, 11, 4)


def _trained(pins: dict[str, Any]) -> tuple[float, int, int, int]:
    """The largest difference of a loss from eager code's, in training and evaluation; how often a
    line says that programs are dropped; captures and programs that are held."""
    torch.manual_seed(0)
    plain = Tagger(shifted).double()
    ours, furthest, said = copy.deepcopy(plain), 0.0, io.StringIO()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, ours)]
    with contextlib.redirect_stderr(said):
        graphaccel.optimize(ours, optimizers[1], devices=2, max_programs=2, check="off", **pins)
        for length in LENGTHS:
            losses = []
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                loss = model.train()(*_of_length(length))["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    evaluated = model.eval()(*_of_length(length))["loss"]
                losses.append(torch.stack([loss.detach(), evaluated]))
            furthest = max(furthest, (losses[0] - losses[1]).abs().max().item())
    lines = said.getvalue().count("more than max_programs=2 shapes of batches")
    return furthest, lines, len(captures_in(ours).steps), len(executors_in(ours))


@pytest.mark.parametrize(
    "pins", [{"data": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}], ids=["zero 3", "pipeline"]
)
def test_as_eager_mode_with_few_programs(pool: Pool, pins: dict[str, Any]) -> None:
    results = pool.run(2, _trained, pins)
    assert sum(lines for _, lines, _, _ in results) == 1  # of the first rank
    for furthest, _, captures, programs in results:
        assert furthest < 1e-12
        assert captures <= 3  # of training, and of an evaluation
        assert programs == 2
