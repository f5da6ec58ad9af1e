"""examples/nanogpt: the same script without graphaccel and with it."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
import torch

from .conftest import EXAMPLES

SMALL = (
    "--block-size=32 --n-layer=2 --n-head=2 --n-embd=32 --warmup-iters=0 --min-lr=1e-3 "
    "--eval-interval=3 --eval-iters=2 --log-interval=1"
).split()
FOLDER = EXAMPLES / "nanogpt"


def numbers(out: str) -> dict[str, list[float]]:
    """Losses by the step they were printed at, times left out."""
    lines = re.findall(r"^((?:step|iter) \d+): (.*?)(?:, time .*)?$", out, re.MULTILINE)
    return {step: [float(x) for x in re.findall(r"\d+\.\d+", rest)] for step, rest in lines}


def test_one_line_and_its_import_are_added() -> None:
    plain, ours = ((FOLDER / name).read_text() for name in ("train_plain.py", "train.py"))
    changes = [
        line
        for line in difflib.ndiff(plain.splitlines(), ours.splitlines())
        if line[0] in "+-?" and line[1:].strip()
    ]
    assert changes == [
        "+ import graphaccel",
        "+ model, optimizer = graphaccel.optimize(model, optimizer)",
    ]


def test_it_learns_and_resumes_where_it_stopped(run_here, tmp_path: Path) -> None:
    script, stopped = "nanogpt/train_plain.py", f"--out={tmp_path / 'stopped.pt'}"
    whole = run_here(script, *SMALL, "--max-iters=6", f"--out={tmp_path / 'whole.pt'}")
    first = run_here(script, *SMALL, "--max-iters=3", stopped)
    second = run_here(script, *SMALL, "--max-iters=6", stopped, "--resume")
    assert f"resumed {tmp_path / 'stopped.pt'} at iteration 3" in second
    steps = numbers(whole)
    assert list(steps) == [
        *("step 0", "iter 0", "iter 1", "iter 2"),
        *("step 3", "iter 3", "iter 4", "iter 5", "step 6"),
    ]
    assert {**numbers(first), **numbers(second)} == steps
    train, validation = steps["step 6"]
    assert train < steps["step 0"][0] - 0.1
    assert validation < steps["step 0"][1] - 0.1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stopped.pt", "whole.pt"]


@pytest.mark.multiprocess
def test_two_processes_print_and_save_what_one_does(run_here, run_ranks, tmp_path: Path) -> None:
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    plain = run_here("nanogpt/train_plain.py", *SMALL, "--max-iters=6", f"--out={one}")
    ours = numbers(run_ranks("nanogpt/train.py", *SMALL, "--max-iters=6", f"--out={two}"))
    expected = numbers(plain)
    assert list(ours) == list(expected)
    for step, losses in expected.items():
        assert ours[step] == pytest.approx(losses, abs=2e-4), step
    saved, reference = (torch.load(file, weights_only=True) for file in (two, one))
    assert list(saved["model"]) == list(reference["model"])
    for name, tensor in reference["model"].items():
        torch.testing.assert_close(saved["model"][name], tensor, atol=2e-4, rtol=0, msg=name)


@pytest.mark.multiprocess
def test_two_processes_resume_what_one_saved(run_here, run_ranks, tmp_path: Path) -> None:
    whole = numbers(
        run_here(
            "nanogpt/train_plain.py", *SMALL, "--max-iters=6", f"--out={tmp_path / 'whole.pt'}"
        )
    )
    out = f"--out={tmp_path / 'stopped.pt'}"
    run_here("nanogpt/train_plain.py", *SMALL, "--max-iters=3", out)
    printed = run_ranks("nanogpt/train.py", *SMALL, "--max-iters=6", out, "--resume")
    assert f"resumed {tmp_path / 'stopped.pt'} at iteration 3" in printed
    resumed = numbers(printed)
    assert list(resumed) == ["iter 3", "iter 4", "iter 5", "step 6"]
    for step, losses in resumed.items():
        assert losses == pytest.approx(whole[step], abs=2e-4), step
