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


def _leave_half(whole: Path, half: Path) -> None:
    """What a run leaves that is killed while it writes a checkpoint."""
    half.mkdir()
    for file in sorted(whole.iterdir())[::2]:
        content = file.read_bytes()
        (half / file.name).write_bytes(content[: len(content) // 2])


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
    root = tmp_path / "two" / ("parts" if sharded else "whole")
    got = losses(run_apart(*two))
    assert (root / "latest").read_text() == "step-3"
    _leave_half(root / "step-3", root / "step-5")
    got += losses(run_apart(*two, *then, "--resume"))
    assert (root / "latest").read_text() == "step-6"
    assert len(expected) == 6
    assert got == pytest.approx(expected, abs=1e-5)
    if not sharded:
        files = (tmp_path / run / "whole" / "step-6" / "weights.pt" for run in ("one", "two"))
        single, several = map(torch.load, files)
        torch.testing.assert_close(several, single, atol=1e-4, rtol=0)
