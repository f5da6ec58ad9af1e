"""examples/trainer: it learns, and its folder is one that transformers loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

SCRIPT = "trainer/train.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the libraries deprecate is not ours
def test_it_learns_resumes_and_is_loaded(run_here, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    out = run_here(SCRIPT, "--folder", folder, "--steps=10", "--length=16")
    losses = [float(x) for x in re.findall(r"'loss': '?(\d+\.\d+)", out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.5
    again = run_here(SCRIPT, "--folder", folder, "--steps=14", "--length=16", "--resume")
    assert len(re.findall(r"'loss': '?(\d+\.\d+)", again)) == 4
    model = GPT2LMHeadModel.from_pretrained(f"{folder}/model")
    assert model.config.n_layer == 4
