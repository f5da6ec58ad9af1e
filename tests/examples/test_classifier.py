"""examples/classifier: an ordinary script whose loss is outside of the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import EXAMPLES

SCRIPT = EXAMPLES / "classifier" / "train.py"
ADDED = (
    "import graphaccel\n",
    "    model, optimizer = graphaccel.optimize(model, optimizer)\n",
)


def numbers(out: str) -> list[list[float]]:
    return [[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in out.splitlines()]


@pytest.mark.multiprocess
def test_two_processes_print_what_the_plain_script_does(
    run_here, run_ranks, tmp_path: Path
) -> None:
    text = SCRIPT.read_text()
    for line in ADDED:
        assert text.count(line) == 1
        text = text.replace(line, "")
    plain = tmp_path / "plain.py"
    plain.write_text(text)
    expected = numbers(run_here(str(plain), "--steps", "30"))
    ours = numbers(run_ranks("classifier/train.py", "--steps", "30"))
    assert len(ours) == len(expected) == 5
    for got, true in zip(ours, expected, strict=True):
        assert got == pytest.approx(true, abs=2e-2)
    assert [first for first, *_ in ours[:3]] == pytest.approx(
        [first for first, *_ in expected[:3]], abs=2e-4
    )
    assert expected[-1][0] >= 0.65  # better than chance
