"""examples/checkpoints: a run that stops and resumes under a pipeline is the run that does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .conftest import EXAMPLES

SCRIPT = "checkpoints/train.py"


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"^loss (\d+\.\d+)$", out, re.MULTILINE)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("sharded", "then"),
    [([], []), (["--sharded"], ["--pipeline=1", "--zero=3"])],
    ids=["one file", "sharded, under another plan"],
)
def test_it_resumes_where_it_stopped(
    run_here, run_apart, tmp_path: Path, sharded: list[str], then: list[str]
) -> None:
    one = ("--devices=1", "--pipeline=1", f"--folder={tmp_path / 'one'}")
    expected = losses(run_here(SCRIPT, *one, "--steps=6"))
    two = (str(EXAMPLES / SCRIPT), f"--folder={tmp_path / 'two'}", "--steps=3", *sharded)
    got = losses(run_apart(*two)) + losses(run_apart(*two, *then, "--resume"))
    assert len(expected) == 6
    assert got == pytest.approx(expected, abs=1e-5)
    if not sharded:
        single, several = (torch.load(tmp_path / run / "weights.pt") for run in ("one", "two"))
        torch.testing.assert_close(several, single, atol=1e-4, rtol=0)
