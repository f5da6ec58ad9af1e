"""examples/checkpoints: a run that resumes under another plan is one that does not stop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

from .conftest import EXAMPLES

SCRIPT = "checkpoints/train.py"


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"^step \d+ loss (\d+\.\d+)$", out, re.MULTILINE)]


def _leave_half(whole: Path, half: Path) -> None:
    """What a run leaves that is killed while it writes a checkpoint."""
    half.mkdir()
    for file in sorted(whole.iterdir()):
        if file.name != "manifest.json":
            content = file.read_bytes()
            (half / file.name).write_bytes(content[: len(content) // 2])


@pytest.mark.release
@pytest.mark.multiprocess
def test_it_resumes_where_it_stopped_under_another_plan(
    run_here, run_apart, run_ranks, tmp_path: Path
) -> None:
    one = ("--devices=1", "--pipeline=1", f"--folder={tmp_path / 'one'}")
    expected = losses(run_here(SCRIPT, *one, "--steps=6", f"--export={tmp_path / 'single'}"))
    root = tmp_path / "two"
    two = (f"--folder={root}", "--steps=3")
    # What is written in the background is complete when the processes have ended.
    got = losses(run_apart(str(EXAMPLES / SCRIPT), *two, "--asynchronous"))
    _leave_half(root / "step-00000003", root / "step-00000005")
    more = ("--pipeline=1", "--zero=3", f"--export={tmp_path / 'several'}")
    got += losses(run_ranks(SCRIPT, *two, *more))
    complete = sorted(path.parent.name for path in root.glob("step-*/manifest.json"))
    assert complete == ["step-00000005", "step-00000006"]  # two are kept
    assert len(expected) == 6
    assert got == pytest.approx(expected, abs=1e-5)
    single, several = (
        safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        for name in ("single", "several")
    )
    torch.testing.assert_close(several, single, atol=1e-4, rtol=0)
